"""The arguments of TurboDiffusion's inference scripts."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from turbo_rcm_patch import PatchConfig, RCMScheduler
from turbo_rcm_patch.errors import ConfigError, TurboRCMError
from turbo_rcm_patch.output import check_writable
from turbo_rcm_patch.video.load import check_offload, choose_device
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
STRIDE: Final = 16
#: Arguments of TurboDiffusion that change nothing, and why.
WITHOUT_EFFECT: Final = {
    "vae_path": "the VAE is that of --base, which has the same weights",
    "text_encoder_path": "the text encoder is that of --base, which has the same weights",
    "default_norm": "patched blocks run their norms fused",
}


_CHECKPOINT: Final = (
    "TurboDiffusion's .pth, converted on first use, or a pipeline folder that `turbo-rcm-patch "
    "convert --base` wrote"
)


def text_to_video_parser(description: str) -> argparse.ArgumentParser:
    """The arguments of `wan2.1_t2v_infer.py`, and some of this library."""
    parser = _parser(description, ("Wan2.1-1.3B", "Wan2.1-14B"), 80.0, "480p")
    parser.add_argument("--dit_path", required=True, metavar="PATH", help=_CHECKPOINT)
    return parser


def image_to_video_parser(description: str) -> argparse.ArgumentParser:
    """The arguments of `wan2.2_i2v_infer.py`, and some of this library."""
    parser = _parser(description, ("Wan2.2-A14B",), 200.0, "720p")
    add = parser.add_argument
    add("--image_path", required=True, metavar="PATH", help="the first frame")
    for noise in ("high", "low"):
        name = f"--{noise}_noise_model_path"
        add(name, required=True, metavar="PATH", help=f"{noise}-noise expert: {_CHECKPOINT}")
    add("--boundary", type=_between(0.0, 1.0, float), default=0.9,
        help="time, from 1 to 0, under which the low-noise expert runs (%(default)s)")  # fmt: skip
    add("--adaptive_resolution", action="store_true",
        help="the image's own aspect ratio, with the area of the given size")  # fmt: skip
    add("--ode", action="store_true", help="no fresh noise between steps: sharper, less robust")
    return parser


def _between(least: float, most: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text}")
        return value

    return read


def _parser(
    description: str, models: tuple[str, ...], sigma_max: float, resolution: str
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, count = parser.add_argument, _between(1, 2**31, int)
    add("--prompt", required=True, metavar="TEXT", help="the scene")
    add("--model", choices=models, default=models[0], help="chooses the default --base")
    add("--num_samples", type=count, default=1, help="videos, side by side (%(default)s)")
    add("--num_steps", type=int, choices=(1, 2, 3, 4), default=4, help="network calls")
    add("--sigma_max", type=float, default=sigma_max, help="first noise level (%(default)s)")
    add("--num_frames", type=count, default=81,
        help="frames; the largest 4n + 1 of them are made (%(default)s)")  # fmt: skip
    add("--resolution", default=resolution,
        help=f"one of {', '.join(RESOLUTIONS)}, or WIDTHxHEIGHT (%(default)s)")  # fmt: skip
    add("--aspect_ratio", default="16:9", help="1:1, 4:3, 3:4, 16:9 or 9:16 (%(default)s)")
    add("--seed", type=_between(-(2**63), 2**64 - 1, int), default=0, help="of all noise")
    add("--save_path", default="output/generated_video.mp4", help="the mp4 (%(default)s)")
    add("--attention_type", choices=("sla", "sagesla", "original"), default="sagesla",
        help="sparse-linear attention (sla and sagesla are the same here), or dense")  # fmt: skip
    add("--sla_topk", type=float, default=0.1, help="share of key blocks in SLA (%(default)s)")
    add("--quant_linear", action="store_true",
        help="int8 Linears, with the integers of a -quant checkpoint")  # fmt: skip
    none = "no effect: {}".format
    add("--default_norm", action="store_true", help=none(WITHOUT_EFFECT["default_norm"]))
    for name in ("vae_path", "text_encoder_path"):
        add(f"--{name}", metavar="PATH", help=none(WITHOUT_EFFECT[name]))
    more = parser.add_argument_group("beyond TurboDiffusion's arguments")
    add = more.add_argument
    add("--base", metavar="FOLDER_OR_HUB_ID", help="diffusers pipeline of the same Wan version")
    add("--cache", metavar="FOLDER", help="where a .pth is converted to, once (beside it)")
    add("--no_patch", action="store_true", help="diffusers' own dense attention, to compare with")
    add("--offload", choices=("none", "model", "group"), default="none",
        help="keep unused parts in the CPU's memory")  # fmt: skip
    add("--device", help="where to run (a GPU if there is one)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="of transformer and text encoder; the VAE runs in fp32 (%(default)s)")  # fmt: skip
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse, and refuse impossible values before anything is loaded. Arguments without effect are
    named on standard error.

    Args:
        parser: One of the two of this module.
        argv: Arguments without the program's name; by default those of the process.

    Raises:
        ConfigError: A value outside its domain, or `--serve`.
        DeviceError: There is no such device here, or none to offload from.
    """
    if "--serve" in (sys.argv[1:] if argv is None else argv):
        raise ConfigError(
            "--serve",
            expected="a prompt a call",
            got="TurboDiffusion's terminal server",
            remedy="Convert the checkpoint (`turbo-rcm-patch convert --base`), and make many "
            "videos in one process with `turbo-rcm-patch generate`",
        )
    arguments = parser.parse_args(argv)
    frame_size(arguments)
    patch_config(arguments)
    RCMScheduler(sigma_max=arguments.sigma_max).set_timesteps(arguments.num_steps)
    path = Path(arguments.save_path).expanduser()
    arguments.save_path = path if path.suffix else path.with_name(f"{path.name}.mp4")
    if arguments.save_path.suffix.lower() not in ENDINGS:
        raise ConfigError("--save_path", expected=f"an ending of {ENDINGS}", got=str(path))
    check_writable(arguments.save_path)
    find_ffmpeg()
    check_offload(arguments.offload, choose_device(arguments.device))
    for name, why in WITHOUT_EFFECT.items():
        if getattr(arguments, name):
            print(f"--{name} has no effect: {why}", file=sys.stderr)
    return arguments


def frame_size(arguments: argparse.Namespace) -> tuple[int, int]:
    """The width and height that --resolution and --aspect_ratio ask for.

    Raises:
        ConfigError: There is no such resolution or aspect ratio.
    """
    resolution, ratio = arguments.resolution, arguments.aspect_ratio
    if size := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", resolution):
        width, height = int(size[1]), int(size[2])
        if width % STRIDE or height % STRIDE:
            raise ConfigError("--resolution", expected=f"multiples of {STRIDE}", got=resolution)
        return width, height
    for name, value, known in (
        ("--resolution", resolution, (*RESOLUTIONS, "WIDTHxHEIGHT")),
        ("--aspect_ratio", ratio, tuple(RESOLUTIONS.get(resolution, ()))),
    ):
        if value not in known or value == "WIDTHxHEIGHT":
            raise ConfigError(name, expected=f"one of {known}", got=repr(value))
    return RESOLUTIONS[resolution][ratio]


def patch_config(arguments: argparse.Namespace) -> PatchConfig:
    """The configuration of `patch_model` that the arguments ask for."""
    return PatchConfig(
        linear="int8" if arguments.quant_linear else "as-is", sla_topk=arguments.sla_topk
    )


def run(main: Callable[[], None]) -> int:
    """Run a script's main function; return its exit code: 0, 2 for a mistake in the arguments, the
    model or the files or too little memory on the GPU, or 130 if interrupted."""
    try:
        main()
        return 0
    except TurboRCMError as error:
        print(error.block(), file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"{error}\nTry --offload model, or a smaller video.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. Nothing unfinished is written.", file=sys.stderr)
        return 130
