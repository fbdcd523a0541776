"""A checkpoint of TurboDiffusion, patched. `python examples/turbowan.py FILE.pth BASE [PROMPT]`

It needs `pip install '.[all]'`. BASE is a folder of the same model as diffusers publishes it, for
instance of `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`; VAE and text encoder are taken from there.
"""

import sys
from pathlib import Path

from turbo_rcm_patch import patch_model
from turbo_rcm_patch.checkpoints import convert_pipeline
from turbo_rcm_patch.video import generate, load_pipeline

if len(sys.argv) < 3 or "--help" in sys.argv or "-h" in sys.argv:
    sys.exit(__doc__)
checkpoint, base = map(Path, sys.argv[1:3])
prompt = " ".join(sys.argv[3:]) or "a cat walks on the grass, realistic"
out = Path("outputs/turbowan/video.mp4")

folder = checkpoint.with_suffix("")
if not folder.exists():
    quantised = "-quant" in checkpoint.name
    convert_pipeline(checkpoint, folder, base=base, int8_only=quantised)  # once

pipe = load_pipeline(folder)  # with SLA's projection
print(patch_model(pipe, linear="int8"))

video = generate(pipe, prompt, seed=0)  # four steps of the rCM sampler
print(video, video.save(out))
