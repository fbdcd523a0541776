"""The arguments of TurboDiffusion's inference scripts, and what they mean here."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError, OutputError, TurboRCMError
from turbo_rcm_patch.exit_codes import run_command
from turbo_rcm_patch.output import check_writable
from turbo_rcm_patch.usage import add_options
from turbo_rcm_patch.video.load import check_offload, choose_device, resolve_model
from turbo_rcm_patch.video.rcm_times import MAX_STEPS
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.video import ENDINGS, find_ffmpeg

#: Name -> aspect ratio -> (width, height), as the models were distilled.
RESOLUTIONS: Final[dict[str, dict[str, tuple[int, int]]]] = {
    name: dict(zip(("1:1", "4:3", "3:4", "16:9", "9:16"), sizes, strict=True))
    for name, sizes in {
        "480": ((480, 480), (640, 480), (480, 640), (768, 432), (432, 768)),
        "480p": ((640, 640), (640, 480), (480, 640), (832, 480), (480, 832)),
        "512": ((512, 512), (640, 512), (512, 640), (640, 384), (384, 640)),
        "720": ((960, 960), (960, 704), (704, 960), (1280, 704), (704, 1280)),
        "720p": ((960, 960), (960, 720), (720, 960), (1280, 720), (720, 1280)),
    }.items()
}
#: Width and height are multiples of this: eight of the VAE, two of the transformer's patches.
_STRIDE: Final = 16
_SIZE: Final = re.compile(r"([1-9]\d*)x([1-9]\d*)")
#: What to do about an argument that is missing.
_MISSING: Final = {
    "prompt": "Pass --prompt TEXT, or --serve to type prompts",
    "image_path": "Pass --image_path FILE, a picture to start from, or --serve to name one for "
    "each prompt",
}


def text_to_video_parser(description: str, *, epilog: str = "") -> argparse.ArgumentParser:
    """Every argument of TurboDiffusion's text-to-video script, and some of ours."""
    parser = _parser(description, epilog)
    parser.add_argument(
        "--dit_path",
        required=True,
        metavar="PATH",
        help="TurboDiffusion's .pth file (converted on first use), or a folder that `python -m "
        "turbo_rcm_patch convert` wrote",
    )
    _add_shared(
        parser,
        models=("Wan2.1-1.3B", "Wan2.1-14B"),
        sigma_max=80.0,
        resolution="480p",
        base="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    )
    return parser


def image_to_video_parser(description: str, *, epilog: str = "") -> argparse.ArgumentParser:
    """Every argument of TurboDiffusion's image-to-video script, and some of ours."""
    parser = _parser(description, epilog)
    parser.add_argument("--image_path", metavar="PATH", help="the first frame")
    for noise in ("high", "low"):
        parser.add_argument(
            f"--{noise}_noise_model_path",
            required=True,
            metavar="PATH",
            help=f"the {noise}-noise expert: TurboDiffusion's .pth file (converted on first use), "
            "or a folder that `python -m turbo_rcm_patch convert` wrote",
        )
    options = {
        "--boundary R": "time from 1 (noise) to 0 under which the low-noise expert runs (0.9)",
        "--adaptive_resolution": "the image's own aspect ratio, with the area of --resolution and "
        "--aspect_ratio",
        "--ode": "no fresh noise between steps: sharper, less robust",
    }
    add_options(parser, options, boundary=0.9)
    _add_shared(
        parser,
        models=("Wan2.2-A14B",),
        sigma_max=200.0,
        resolution="720p",
        base="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse, and refuse what cannot be meant before anything is loaded.

    Args:
        parser: One of the two of this module.
        argv: Arguments without the program's name; by default those of the process.

    Raises:
        ConfigError: A value outside its domain, or an argument that has no meaning here.
        DeviceError: There is no such device here, or none to offload from.
        ModelFolderError: --base is no folder and cannot be a hub id.
    """
    arguments = parser.parse_args(argv)
    for name in ("vae_path", "text_encoder_path"):
        value = getattr(arguments, name)
        if value and not Path(value).expanduser().is_file():
            raise ConfigError(
                f"--{name}",
                expected="a file that Wan's authors publish",
                got=repr(value),
                remedy=f"Leave --{name} out: --base has one too",
            )
    for name in ("prompt", "image_path"):
        if not getattr(arguments, name, "given") and not arguments.serve:
            raise ConfigError(
                f"--{name}", expected="to be given", got="nothing", remedy=_MISSING[name]
            )
    check_values(arguments)
    boundary = getattr(arguments, "boundary", 0.0)
    if not 0.0 <= boundary <= 1.0:
        raise ConfigError("--boundary", expected="a time from 0 to 1", got=f"{boundary:g}")
    frame_size(arguments.resolution, arguments.aspect_ratio)
    patch_config(arguments)
    check_video_path(video_path(arguments.save_path))
    check_offload(arguments.offload, choose_device(arguments.device))
    if arguments.base is not None:
        resolve_model(arguments.base)
    return arguments


def check_values(arguments: argparse.Namespace) -> None:
    """Refuse settings outside their domain, of those that may change between two videos.

    Raises:
        ConfigError: The first of them.
    """
    for name in ("num_samples", "num_frames"):
        value = getattr(arguments, name)
        if value < 1:
            raise ConfigError(f"--{name}", expected="at least 1", got=str(value))
    if not -(2**63) <= arguments.seed < 2**64:
        raise ConfigError("--seed", expected="at most 64 bits", got=str(arguments.seed))
    RCMScheduler(sigma_max=arguments.sigma_max).set_timesteps(arguments.num_steps)


def base_of(arguments: argparse.Namespace, checkpoint: str) -> str:
    """--base, by default the checkpoint if it is a pipeline folder, or else the model's hub id."""
    if arguments.base is not None:
        return str(arguments.base)
    whole = (Path(checkpoint).expanduser() / "model_index.json").is_file()
    return checkpoint if whole else str(arguments.default_base)


def run(main: Callable[[], int | None]) -> int:
    """Run a script's main function.

    Returns:
        What it returns, or 0; 2 for a mistake in the arguments, the model or the files, or too
        little memory on the GPU, which is told in a line; 3 for an error nobody foresaw; 130 if
        interrupted.
    """

    def run() -> int:
        try:
            return main() or 0
        except torch.OutOfMemoryError as error:
            print(told(error), file=sys.stderr)
            return 2

    return run_command(run, told, interrupted="Interrupted. What was not finished is not written.")


def told(error: TurboRCMError | torch.OutOfMemoryError) -> str:
    """The line that a person reads."""
    if isinstance(error, TurboRCMError):
        return f"{type(error).__name__}: {error}"
    return f"{error}\nTry --offload model, a smaller --resolution or fewer frames or samples."


def frame_size(resolution: str, aspect_ratio: str = "16:9") -> tuple[int, int]:
    """Width and height of a video.

    Args:
        resolution: A name in `RESOLUTIONS`, or WIDTHxHEIGHT in multiples of 16.
        aspect_ratio: width:height, for a name.

    Raises:
        ConfigError: There is no such resolution or aspect ratio.
    """
    if size := _SIZE.fullmatch(resolution):
        width, height = int(size[1]), int(size[2])
        if width % _STRIDE or height % _STRIDE:
            raise ConfigError(
                "--resolution", expected=f"multiples of {_STRIDE}", got=f"{width}x{height}"
            )
        return width, height
    if resolution not in RESOLUTIONS:
        raise ConfigError(
            "--resolution",
            expected=f"one of {tuple(RESOLUTIONS)} or WIDTHxHEIGHT",
            got=repr(resolution),
        )
    sizes = RESOLUTIONS[resolution]
    if aspect_ratio not in sizes:
        raise ConfigError(
            "--aspect_ratio", expected=f"one of {tuple(sizes)}", got=repr(aspect_ratio)
        )
    return sizes[aspect_ratio]


def patch_config(arguments: argparse.Namespace) -> PatchConfig:
    """How `patch_model` is to run what the arguments ask for."""
    if not 0.0 < arguments.sla_topk <= 1.0:
        raise ConfigError(
            "--sla_topk",
            expected="a share of the key blocks, in (0, 1]",
            got=f"{arguments.sla_topk:g}",
            remedy="Pass --sla_topk 0.1, or only --attention_type original, for all keys",
        )
    return PatchConfig(
        linear="int8" if arguments.quant_linear else "as-is",
        guard=arguments.guard,
        sla_topk=arguments.sla_topk,
    )


def video_path(save_path: str) -> Path:
    """The file of --save_path, an mp4 if its name does not end."""
    target = Path(save_path).expanduser()
    return target if target.suffix or not target.name else target.with_name(f"{target.name}.mp4")


def check_video_path(target: Path) -> None:
    """Refuse a file that cannot be written, before the model is loaded and not after the video is
    made.

    Raises:
        ConfigError: It is of another kind, or in no folder that can be written to.
    """
    if target.name and target.suffix.lower() not in ENDINGS:
        raise ConfigError(
            "--save_path",
            expected=f"a file name that ends in one of {ENDINGS}",
            got=str(target),
            remedy="Let it end in .mp4",
        )
    try:
        check_writable(target)
    except OutputError as error:
        raise ConfigError(
            "--save_path",
            expected="a file in a folder that can be written to",
            got=f"{target}: {error.got}",
            remedy=error.remedy,
        ) from error
    find_ffmpeg()


def _parser(description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_shared(
    parser: argparse.ArgumentParser,
    *,
    models: tuple[str, ...],
    sigma_max: float,
    resolution: str,
    base: str,
) -> None:
    options = {
        "--prompt TEXT": "what to show",
        f"--model {{{','.join(models)}}}": "refuse a checkpoint of other sizes; they are read "
        "from it",
        "--num_samples N": "videos, side by side (1)",
        "--sigma_max S": f"noise level of the first step ({sigma_max:g})",
        "--num_frames N": "frames; the largest 4n + 1 of them are made (81)",
        "--resolution SIZE": f"one of {', '.join(RESOLUTIONS)}, or WIDTHxHEIGHT ({resolution})",
        "--aspect_ratio W:H": "1:1, 4:3, 3:4, 16:9 or 9:16 (16:9)",
        "--seed N": "of all noise (0)",
        "--save_path PATH": "the mp4 (output/generated_video.mp4)",
        "--attention_type {sla,sagesla,original}": "sparse-linear attention, or none of it "
        "(sagesla); sla and sagesla are one here, with int8 queries and keys as SageSLA has them",
        "--sla_topk R": "fraction of key blocks that sparse attention keeps (0.1)",
        "--quant_linear": "int8 Linears, with the integers of a -quant checkpoint; of another "
        "they are made here. Without this option a -quant checkpoint runs with its "
        "dequantised weights",
        "--default_norm": "no effect: norms are fused where blocks are patched",
        "--vae_path PATH": "Wan2.1_VAE.pth, in place of the VAE of --base",
        "--text_encoder_path PATH": "models_t5_umt5-xxl-enc-bf16.pth, in place of that of --base",
        "--serve": "keep the model loaded and read prompts from standard input, and settings "
        "(/help lists the commands); videos are numbered",
    }
    add_options(
        parser, options, num_samples=1, sigma_max=sigma_max, num_frames=81, resolution=resolution,
        aspect_ratio="16:9", seed=0, save_path="output/generated_video.mp4",
        attention_type="sagesla", sla_topk=0.1,
    )  # fmt: skip
    steps = range(1, MAX_STEPS + 1)
    parser.add_argument(
        "--num_steps", type=int, choices=steps, default=MAX_STEPS, help="network calls (4)"
    )
    ours = {
        "--base FOLDER_OR_HUB_ID": "a diffusers pipeline of the same Wan version, for VAE, text "
        f"encoder and tokenizer (that of a converted pipeline, or {base})",
        "--cache PLACE": "folder where a .pth file is converted to, once (beside it)",
        "--no_patch": "diffusers' own dense attention, for comparison",
        "--guard": "compare every pair with the author's code on the first and last step, which "
        "costs two slow calls",
        "--offload {none,model,sequential}": "what is not in use waits in the CPU's memory",
        "--device DEVICE": "where to run (a GPU if there is one)",
        "--dtype {bfloat16,float32}": "of the rest (bfloat16)",
        "--vae_dtype {bfloat16,float32}": "of the VAE (bfloat16)",
    }
    group = parser.add_argument_group("beyond TurboDiffusion's arguments")
    add_options(group, ours, offload="none", dtype="bfloat16", vae_dtype="bfloat16")
    parser.set_defaults(default_base=base)
