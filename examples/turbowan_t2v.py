"""TurboDiffusion's Wan 2.1 text to video: its arguments and seeds, diffusers' pipeline.

The checkpoint is converted on first use, to a folder beside it. VAE, text encoder and tokenizer
are those of --base, a diffusers folder or hub id.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import WanPipeline

from turbo_rcm_patch import RCMScheduler, patch_model
from turbo_rcm_patch.sampling.progress import bars
from turbowan.arguments import base_of, frame_size, parse, patch_config, run, text_to_video_parser
from turbowan.models import load, transformer_folders
from turbowan.sampling import decode, sample, write_video
from turbowan.serving import serve

EXAMPLE = """\
example:
  python examples/turbowan_t2v.py --dit_path checkpoints/TurboWan2.1-T2V-1.3B-480P-quant.pth \\
      --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers --quant_linear --num_steps 4 --seed 0 \\
      --prompt "a cat walks on the grass, realistic" --save_path output/cat.mp4
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(text_to_video_parser(__doc__ or "", epilog=EXAMPLE), argv)
    width, height = frame_size(args.resolution, args.aspect_ratio)

    # Load: the converted transformer, and the rest of the base.
    base = base_of(args, args.dit_path)
    with bars() as progress:
        folders = transformer_folders(
            [args.dit_path], base=base, cache=args.cache, progress=progress
        )
    pipe = load(
        WanPipeline,
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
    pipe.scheduler = RCMScheduler(sigma_max=args.sigma_max, timestep_dtype="bfloat16")

    # Patch.
    report = None if args.no_patch else patch_model(pipe, patch_config(args))

    def generate(prompt: str, path: Path) -> None:
        # Sample, with the settings as they are now: --serve may change them.
        pipe.scheduler = RCMScheduler.from_config(pipe.scheduler.config, sigma_max=args.sigma_max)
        latents = sample(
            pipe,
            prompt,
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
