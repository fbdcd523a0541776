"""TurboDiffusion's Wan 2.1 text to video: its arguments and seeds, diffusers' pipeline.

The checkpoint is converted on first use, to a folder beside it. VAE, text encoder and tokenizer
are those of --base, a diffusers folder or hub id.
"""

import sys
from collections.abc import Sequence

from diffusers import WanPipeline

from turbo_rcm_patch import patch_model
from turbowan.arguments import frame_size, parse, patch_config, run, text_to_video_parser
from turbowan.models import load_given
from turbowan.serving import make_videos

EXAMPLE = """\
example:
  python examples/turbowan_t2v.py --dit_path checkpoints/TurboWan2.1-T2V-1.3B-480P-quant.pth \\
      --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers --quant_linear --num_steps 4 --seed 0 \\
      --prompt "a cat walks on the grass, realistic" --save_path output/cat.mp4
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(text_to_video_parser(__doc__ or "", epilog=EXAMPLE), argv)
    width, height = frame_size(args.resolution, args.aspect_ratio)
    pipe = load_given(WanPipeline, [args.dit_path], args)

    # Patch: everything that can be, unless --no_patch says otherwise.
    report = None if args.no_patch else patch_model(pipe, patch_config(args))
    code = make_videos(pipe, args, lambda: {"width": width, "height": height})
    if report is not None:
        print(report)  # what ran how; with --guard, also how far off it was
    return code


if __name__ == "__main__":
    sys.exit(run(main))
