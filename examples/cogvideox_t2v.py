"""Load, patch, generate, compare. `python examples/cogvideox_t2v.py [PATH_OR_HUB_ID] [PROMPT ...]`

It needs `pip install '.[all]'`. Without arguments the shipped tiny CogVideoX runs, also on a CPU.
CogVideoX-2B, 5B and 1.5, for instance `THUDM/CogVideoX-2b`, want a GPU.
"""

import sys
from pathlib import Path

from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.tiny import DEMO_PROMPTS
from turbo_rcm_patch.video import compare, generate, load_pipeline

if "--help" in sys.argv or "-h" in sys.argv:
    print(__doc__)
    sys.exit()
model = sys.argv[1] if len(sys.argv) > 1 else "tiny-cogvideox"
prompts = sys.argv[2:] or DEMO_PROMPTS  # ten: the verdict is a median, and one prompt scatters
out = Path("outputs/cogvideox")

pipe = load_pipeline(model)  # any CogVideoXPipeline will do; this one has an fp32 VAE
if model != "tiny-cogvideox":
    pipe.vae.enable_tiling()  # a large video is decoded in tiles
print(patch_model(pipe))  # the one line

video = generate(pipe, prompts[0], seed=0)
print(video, video.save(out / "video.mp4"))

unpatch_model(pipe)  # and it is as it was

found = compare(pipe, prompts, out=out / "compare", seed=0)
print(found)
sys.exit(0 if found.verdict == "unchanged" else 1)
