"""Generate, patch, generate again: `python examples/cogvideox_t2v.py PATH_OR_HUB_ID [PROMPT]`.

For CogVideoX-2B, 5B and 1.5, for instance `THUDM/CogVideoX-2b`; a GPU is needed. Both videos start
from the same noise, so what differs between them is what patching changed.
"""

import sys
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline

from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.sampling.metrics import psnr
from turbo_rcm_patch.sampling.video import enlarge, write_mp4

model = sys.argv[1]
prompt = sys.argv[2] if len(sys.argv) > 2 else "a panda plays a guitar by a stream, realistic"
out = Path("outputs/cogvideox")
device = "cuda" if torch.cuda.is_available() else "cpu"

pipe = CogVideoXPipeline.from_pretrained(model, dtype=torch.bfloat16).to(device)
pipe.vae.enable_tiling()


def generate(name: str) -> torch.Tensor:
    """Frames [F, H, W, 3] in 0..1, also written to a file."""
    noise = torch.Generator("cpu").manual_seed(0)
    frames = torch.from_numpy(pipe(prompt, generator=noise, output_type="np").frames[0])
    write_mp4(enlarge(frames), out / f"{name}.mp4", fps=8)
    return frames


before = generate("unpatched")
report = patch_model(pipe)  # the one line
after = generate("patched")
print(report)
print(f"{out}: median PSNR of a frame {psnr(after, before).median():.1f} dB")
unpatch_model(pipe)  # and it is as it was
