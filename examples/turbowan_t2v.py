"""TurboDiffusion's Wan 2.1 text to video: its arguments and seeds, diffusers' pipeline.

The checkpoint is converted on first use, to a folder beside it. VAE, text encoder and tokenizer
are those of --base, a diffusers folder or hub id.

example:
  python examples/turbowan_t2v.py --dit_path checkpoints/TurboWan2.1-T2V-1.3B-480P-quant.pth \\
      --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers --quant_linear --num_steps 4 --seed 0 \\
      --prompt "a cat walks on the grass, realistic" --save_path output/cat.mp4
"""

import sys
from collections.abc import Sequence

from turbo_rcm_patch import patch_model
from turbowan.arguments import frame_size, parse, patch_config, run, text_to_video_parser
from turbowan.video import load, sample, write_video


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(text_to_video_parser(__doc__ or ""), argv)
    pipe = load([args.dit_path], args)
    report = "" if args.no_patch else patch_model(pipe, patch_config(args))
    write_video(sample(pipe, args, frame_size(args)), args.save_path)
    print(args.save_path, report, sep="\n")  # the report says how each pair ran


if __name__ == "__main__":
    sys.exit(run(main))
