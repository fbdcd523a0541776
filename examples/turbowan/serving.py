"""--serve: one loaded model, and prompts, settings and images read from standard input.

It takes the commands of TurboDiffusion's own terminal server. What is asked is written to standard
error, so that standard output lists the videos and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from turbo_rcm_patch import RCMScheduler
from turbo_rcm_patch.errors import TurboRCMError
from turbowan import sampling
from turbowan.arguments import (
    check_values,
    check_video_path,
    told,
    video_path,
)

if TYPE_CHECKING:
    from diffusers import WanImageToVideoPipeline, WanPipeline

#: What `/set` changes, and how it is read.
_SETTABLE: Final[dict[str, type[int] | type[float]]] = {
    "num_steps": int, "num_samples": int, "num_frames": int, "sigma_max": float, "seed": int,
}  # fmt: skip
_HELP: Final = """\
A line is a prompt, and its video is made at once. A line that ends in \\ goes on in the next one.
  /help              this text
  /show              the settings
  /set NAME VALUE    change one of {names}
  /reset             the settings as they were at the start
  /quit              stop"""


def make_videos(
    pipe: WanPipeline | WanImageToVideoPipeline,
    arguments: argparse.Namespace,
    inputs: Callable[[], Mapping[str, Any]],
) -> int:
    """Make the video of the arguments, or with --serve those that are asked for; the exit code.

    Args:
        pipe: From `load_given`, patched or not.
        arguments: From `parse`.
        inputs: Called for each video: width, height, and the image if there is one.
    """

    def generate(prompt: str, path: Path) -> None:
        # With the settings as they are now: --serve may change them.
        config, sigma_max = pipe.scheduler.config, arguments.sigma_max
        pipe.scheduler = RCMScheduler.from_config(config, sigma_max=sigma_max)
        names = ("num_frames", "num_steps", "num_samples", "seed")
        given = {name: getattr(arguments, name) for name in names}
        latents = sampling.sample(pipe, prompt, **inputs(), **given)
        sampling.write_video(sampling.decode(pipe, latents), path)
        print(path)

    return serve(arguments, generate)


def serve(arguments: argparse.Namespace, generate: Callable[[str, Path], None]) -> int:
    """Generate what is asked for.

    With --serve a failure that `run` tells is told at once, and the next prompt is read: the
    loaded model is not lost. Without, it is raised.

    Args:
        arguments: Of `parse`. With --serve its settings change as they are set, and `image_path`
            is the image of the prompt at hand.
        generate: Makes the video of a prompt and writes it to a file.

    Returns:
        0; 2 if a prompt failed.
    """
    code = 0
    for prompt, path in requests(arguments):
        try:
            generate(prompt, path)
            continue
        except (TurboRCMError, torch.OutOfMemoryError) as error:
            if not arguments.serve:
                raise
            _say(told(error))
            code = 2
        torch.cuda.empty_cache()  # Here, where the error no longer holds tensors.
    return code


def requests(arguments: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Prompts and where their videos go: one, or with --serve those of standard input.

    A terminal is asked for an image, if the model takes one, and for the file, each with the
    answer that an empty line stands for. What is no terminal gives a line a prompt, and after each
    the line of its image only if there is no --image_path.

    Args:
        arguments: Of `parse`; see `serve`.
    """
    target = video_path(arguments.save_path)
    if not arguments.serve:
        yield arguments.prompt, target
        return
    start = {name: getattr(arguments, name) for name in _SETTABLE}
    asks_image = hasattr(arguments, "image_path") and (
        not arguments.image_path or sys.stdin.isatty()
    )
    numbers = itertools.count(1)
    if arguments.prompt:
        if not asks_image or _image(arguments):
            yield arguments.prompt, target
    elif sys.stdin.isatty():
        _say("Type a prompt, or /help.")
    while (text := _read_text()) is not None:
        if text.startswith("/"):
            if not _command(text, arguments, start):
                return
        elif text and (not asks_image or _image(arguments)):
            names = (target.with_stem(f"{target.stem}-{n:03d}") for n in numbers)
            path = _output(next(path for path in names if not path.exists()))
            if path is not None:
                yield text, path
    _say("")


def _command(text: str, arguments: argparse.Namespace, start: dict[str, object]) -> bool:
    """Run a command; False for the one that stops."""
    name, *given = text.split()
    match name.lower():
        case "/quit":
            return False
        case "/help":
            _say(_HELP.format(names=", ".join(_SETTABLE)))
        case "/show":
            _say(_shown(arguments, start))
        case "/reset":
            vars(arguments).update(start)
            _say("The settings are as they were at the start.")
        case "/set" if len(given) == 2:
            _set(arguments, *given)
        case "/set":
            _say("/set takes a name and a value: /set num_steps 2")
        case _:
            _say(f"There is no command {name}; /help lists them. A prompt does not begin with /")
    return True


def _set(arguments: argparse.Namespace, name: str, value: str) -> None:
    """Change a setting, or say why not and change nothing."""
    if name not in _SETTABLE:
        _say(f"{name} cannot be set while the model is loaded; expected one of "
             f"{', '.join(_SETTABLE)}")  # fmt: skip
        return
    changed = argparse.Namespace(**vars(arguments))
    try:
        setattr(changed, name, _SETTABLE[name](value))
        check_values(changed)
    except TurboRCMError as error:
        _say(told(error))
    except ValueError:
        kind = "a whole number" if _SETTABLE[name] is int else "a number"
        _say(f"{name}; expected {kind}; got {value!r}.")
    else:
        setattr(arguments, name, getattr(changed, name))
        _say(f"{name} = {getattr(arguments, name)}")


def _shown(arguments: argparse.Namespace, start: dict[str, object]) -> str:
    """Every argument with its value, those that can be set first, and a * at those that were."""
    fixed = {
        name: value
        for name, value in sorted(vars(arguments).items())
        if name not in (*_SETTABLE, "prompt", "serve", "default_base")
        and value not in (None, False, "")
    }
    lines = [
        f"  {name}: {getattr(arguments, name)}{'' if getattr(arguments, name) == was else ' *'}"
        for name, was in start.items()
    ]
    return "\n".join(
        [*lines, "fixed while the model is loaded:", *(f"  {n}: {v}" for n, v in fixed.items())]
    )


def _image(arguments: argparse.Namespace) -> bool:
    """Ask for the image of a prompt; whether there is one."""
    last = arguments.image_path
    given = _read(f"image [{last}]> " if last else "image> ")
    path = (given or "").strip() or last
    if given is None or not path:
        _say("No image, so no video is made.")
        return False
    if not Path(path).expanduser().is_file():
        _say(f"There is no file {path}, so no video is made.")
        return False
    arguments.image_path = path
    return True


def _output(numbered: Path) -> Path | None:
    """Ask a terminal for the file of a video; None if it cannot be written."""
    if not sys.stdin.isatty():
        return numbered
    given = _read(f"output [{numbered}]> ")
    if given is None:
        return None
    path = video_path(given.strip()) if given.strip() else numbered
    try:
        check_video_path(path)
    except TurboRCMError as error:
        _say(told(error))
        return None
    return path


def _read_text() -> str | None:
    """A prompt or a command, over as many lines as end in a backslash; None at the end."""
    lines: list[str] = []
    while (line := _read("... " if lines else "prompt> ")) is not None:
        if not line.endswith("\\"):
            return "\n".join([*lines, line]).strip()
        lines.append(line[:-1])
    return "\n".join(lines).strip() if lines else None


def _read(question: str) -> str | None:
    print(question, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
