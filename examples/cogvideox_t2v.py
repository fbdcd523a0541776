"""Load, patch, generate, compare. `python examples/cogvideox_t2v.py [PATH_OR_HUB_ID] [PROMPT]`

Without arguments the shipped tiny CogVideoX runs, also on a CPU. CogVideoX-2B, 5B and 1.5, for
instance `THUDM/CogVideoX-2b`, want a GPU; their own scheduler and its usual steps are the default.
"""

import sys
from pathlib import Path

from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.sampling import compare, generate, load_pipeline
from turbo_rcm_patch.sampling.video import enlarge, write_mp4

if "--help" in sys.argv or "-h" in sys.argv:
    print(__doc__)
    sys.exit()
model = sys.argv[1] if len(sys.argv) > 1 else "tiny-cogvideox"
prompt = sys.argv[2] if len(sys.argv) > 2 else "a large red circle moving right"
out = Path("outputs/cogvideox")

pipe = load_pipeline(model)  # any CogVideoXPipeline will do; this one has an fp32 VAE
if model != "tiny-cogvideox":
    pipe.vae.enable_tiling()  # a large video is decoded in tiles

print(patch_model(pipe.transformer))  # the one line

video = generate(pipe, prompt, seed=0)
write_mp4(enlarge(video.frames), out / "video.mp4", fps=video.settings.fps)
print(f"{out / 'video.mp4'} in {video.seconds:.1f} s")

unpatch_model(pipe.transformer)  # and it is as it was

print(compare(pipe, prompt, out=out / "compare", seed=0))
