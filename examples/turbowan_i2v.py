"""TurboDiffusion's Wan 2.2 image to video: its arguments and seeds, diffusers' pipeline.

The checkpoints of both experts are converted on first use, to folders beside them. VAE, text
encoder and tokenizer are those of --base, a diffusers folder or hub id.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline

from turbo_rcm_patch import RCMScheduler, patch_model
from turbo_rcm_patch.sampling.progress import bars
from turbowan.arguments import base_of, frame_size, image_to_video_parser, parse, patch_config, run
from turbowan.models import load, transformer_folders
from turbowan.sampling import adapted_size, boundary_ratio, decode, read_image, sample, write_video
from turbowan.serving import serve

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

    # Load: the converted experts, and the rest of the base.
    experts = [args.high_noise_model_path, args.low_noise_model_path]
    base = base_of(args, experts[0])
    with bars() as progress:
        folders = transformer_folders(experts, base=base, cache=args.cache, progress=progress)
    pipe = load(
        WanImageToVideoPipeline,
        folders,
        base,
        sla=args.attention_type != "original" and not args.no_patch,
        int8=args.quant_linear and not args.no_patch,
        model=args.model,
        vae_path=args.vae_path,
        text_encoder_path=args.text_encoder_path,
        dtype=getattr(torch, args.dtype),
        vae_dtype=getattr(torch, args.vae_dtype),
        device=args.device,
        offload=args.offload,
    )
    # Network times in bf16, as the published loop has them.
    pipe.scheduler = RCMScheduler(
        sigma_max=args.sigma_max,
        sampler="ode" if args.ode else "sde",
        timestep_dtype="bfloat16",
    )

    # Patch: both experts or neither.
    report = None if args.no_patch else patch_model(pipe, patch_config(args))

    def generate(prompt: str, path: Path) -> None:
        # The first frame, and a video of its shape.
        image = read_image(args.image_path)
        width, height = area
        if args.adaptive_resolution:
            width, height = adapted_size((image.shape[3], image.shape[2]), area)

        # Sample, with the settings as they are now: --serve may change them. The experts take
        # turns at the times of the published loop.
        pipe.scheduler = RCMScheduler.from_config(pipe.scheduler.config, sigma_max=args.sigma_max)
        switch = boundary_ratio(args.boundary, args.num_steps, args.sigma_max)
        pipe.register_to_config(boundary_ratio=switch)
        latents = sample(
            pipe,
            prompt,
            image=image,
            width=width,
            height=height,
            num_frames=args.num_frames,
            num_steps=args.num_steps,
            num_samples=args.num_samples,
            seed=args.seed,
        )

        # Save: samples side by side.
        write_video(decode(pipe, latents), path)
        print(path)

    code = serve(args, generate)  # one prompt, or with --serve many
    if report is not None:
        print(report)  # what ran how; with --guard, also how far off it was
    return code


if __name__ == "__main__":
    sys.exit(run(main))
