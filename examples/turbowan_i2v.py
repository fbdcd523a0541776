"""TurboDiffusion's Wan 2.2 image to video: its arguments and seeds, diffusers' pipeline.

The two checkpoints are converted on first use, to a folder beside the first. VAE, text encoder and
tokenizer are those of --base, a diffusers folder or hub id.

example:
  python examples/turbowan_i2v.py --quant_linear --adaptive_resolution --ode --seed 0 \\
      --high_noise_model_path checkpoints/TurboWan2.2-I2V-A14B-high-720P-quant.pth \\
      --low_noise_model_path checkpoints/TurboWan2.2-I2V-A14B-low-720P-quant.pth \\
      --base Wan-AI/Wan2.2-I2V-A14B-Diffusers --image_path cat.png \\
      --prompt "the cat looks up and yawns" --save_path output/cat.mp4
"""

import sys
from collections.abc import Sequence

from turbo_rcm_patch import patch_model
from turbowan.arguments import frame_size, image_to_video_parser, parse, patch_config, run
from turbowan.video import adapted_size, boundary_ratio, load, read_image, sample, write_video


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(image_to_video_parser(__doc__ or ""), argv)
    image, size = read_image(args.image_path), frame_size(args)
    if args.adaptive_resolution:
        size = adapted_size(image.size, size)
    pipe = load([args.high_noise_model_path, args.low_noise_model_path], args)
    switch = boundary_ratio(args.boundary, args.num_steps, args.sigma_max)
    pipe.register_to_config(boundary_ratio=switch)
    report = "" if args.no_patch else patch_model(pipe, patch_config(args))
    write_video(sample(pipe, args, size, image), args.save_path)
    print(args.save_path, report, sep="\n")  # the report says how each pair ran


if __name__ == "__main__":
    sys.exit(run(main))
