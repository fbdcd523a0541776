"""Load, patch, generate, compare. `python examples/wan_t2v.py [PATH_OR_HUB_ID] [PROMPT]`

Without arguments the shipped tiny model runs, also on a CPU. For a distilled model of your own
leave `how` empty; any other Wan model wants its own scheduler and its usual number of steps.
"""

import sys
from pathlib import Path

from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.sampling import compare, generate, load_pipeline
from turbo_rcm_patch.sampling.video import enlarge, write_mp4

if "--help" in sys.argv or "-h" in sys.argv:
    print(__doc__)
    sys.exit()
model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
prompt = sys.argv[2] if len(sys.argv) > 2 else "a large red circle moving right"
how = {} if model == "tiny" else {"sampler": "scheduler", "steps": 30}
out = Path("outputs/example")

pipe = load_pipeline(model)  # any WanPipeline will do; this one has bf16 weights and an fp32 VAE

print(patch_model(pipe.transformer))  # the one line

video = generate(pipe, prompt, seed=0, **how)
write_mp4(enlarge(video.frames), out / "video.mp4", fps=video.settings.fps)
print(f"{out / 'video.mp4'} in {video.seconds:.1f} s")

unpatch_model(pipe.transformer)  # and it is as it was

print(compare(pipe, prompt, out=out / "compare", seed=0, **how))
