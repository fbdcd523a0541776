"""TurboDiffusion's Wan 2.2 image to video: its arguments and seeds, diffusers' pipeline.

The checkpoints of both experts are converted on first use, to folders beside them. VAE, text
encoder and tokenizer are those of --base, a diffusers folder or hub id.
"""

import sys
from collections.abc import Sequence
from typing import Any

from diffusers import WanImageToVideoPipeline

from turbo_rcm_patch import patch_model
from turbowan.arguments import frame_size, image_to_video_parser, parse, patch_config, run
from turbowan.models import load_given
from turbowan.sampling import adapted_size, boundary_ratio, read_image
from turbowan.serving import make_videos

EXAMPLE = """\
example:
  python examples/turbowan_i2v.py --quant_linear --adaptive_resolution --ode --seed 0 \\
      --high_noise_model_path checkpoints/TurboWan2.2-I2V-A14B-high-720P-quant.pth \\
      --low_noise_model_path checkpoints/TurboWan2.2-I2V-A14B-low-720P-quant.pth \\
      --base Wan-AI/Wan2.2-I2V-A14B-Diffusers --image_path cat.png \\
      --prompt "the cat looks up and yawns" --save_path output/cat.mp4
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(image_to_video_parser(__doc__ or "", epilog=EXAMPLE), argv)
    area = frame_size(args.resolution, args.aspect_ratio)
    if args.image_path:
        read_image(args.image_path)  # What cannot be read fails before anything loads.

    experts = [args.high_noise_model_path, args.low_noise_model_path]
    pipe = load_given(WanImageToVideoPipeline, experts, args)

    # Patch: everything that can be in both experts, unless --no_patch says otherwise.
    report = None if args.no_patch else patch_model(pipe, patch_config(args))

    def inputs() -> dict[str, Any]:
        image = read_image(args.image_path)
        width, height = area
        if args.adaptive_resolution:
            width, height = adapted_size((image.shape[3], image.shape[2]), area)
        switch = boundary_ratio(args.boundary, args.num_steps, args.sigma_max)
        pipe.register_to_config(boundary_ratio=switch)
        return {"image": image, "width": width, "height": height}

    code = make_videos(pipe, args, inputs)
    if report is not None:
        print(report)  # what ran how; with --guard, also how far off it was
    return code


if __name__ == "__main__":
    sys.exit(run(main))
