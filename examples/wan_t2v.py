"""Load, patch, generate, compare. `python examples/wan_t2v.py [PATH_OR_HUB_ID] [PROMPT ...]`

It needs `pip install '.[all]'`. Without arguments the shipped tiny model runs, also on a CPU.
For a distilled model of your own leave `how` empty; others want their scheduler and its steps.
"""

import sys
from pathlib import Path

from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.tiny import DEMO_PROMPTS
from turbo_rcm_patch.video import SettingsOptions, compare, generate, load_pipeline

if "--help" in sys.argv or "-h" in sys.argv:
    print(__doc__)
    sys.exit()
model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
prompts = sys.argv[2:] or DEMO_PROMPTS  # ten: the verdict is a median, and one prompt scatters
how: SettingsOptions = {} if model == "tiny" else {"sampler": "scheduler", "steps": 30}
out = Path("outputs/example")

pipe = load_pipeline(model)  # any WanPipeline will do; this one has bf16 weights and an fp32 VAE

print(patch_model(pipe))  # the one line

video = generate(pipe, prompts[0], seed=0, **how)
print(video, video.save(out / "video.mp4"))

unpatch_model(pipe)  # and it is as it was

found = compare(pipe, prompts, out=out / "compare", seed=0, **how)
print(found)
sys.exit(0 if found.verdict == "unchanged" else 1)
