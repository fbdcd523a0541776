"""Read and check what `generate` and `compare` share: prompts, an image and the model."""

from __future__ import annotations

from pathlib import Path

import torch

from turbo_rcm_patch.cli import options
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.video.generation import check_seed
from turbo_rcm_patch.video.load import load_pipeline, pipeline_class
from turbo_rcm_patch.video.pipelines import PIPELINES, VideoPipeline, check_image
from turbo_rcm_patch.video.source import Source


def read_prompts(command: options.Run) -> list[str]:
    """Return the prompts of a command: those of --prompt, then those of the file.

    Raises:
        SamplingError: The file cannot be read.
        ConfigError: A prompt is empty, or there are too many for the seed.
    """
    prompts = [*command.prompt]
    if command.prompts is not None:
        prompts += _read_list(command.prompts)
    if not all(prompt.strip() for prompt in prompts):
        raise ConfigError("--prompt", expected="a text", got="an empty one")
    check_seed(command.seed, len(prompts))
    return prompts


def _read_list(path: Path) -> list[str]:
    name = f"--prompts {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SamplingError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SamplingError(
            name,
            expected="a text in UTF-8",
            got=f"byte {error.object[error.start]:#04x} at position {error.start}",
            remedy="Convert it, for instance with `iconv -f latin1 -t utf-8`",
        ) from error
    # Not `splitlines`: a prompt may hold what Unicode takes for the end of a line.
    lines = [line.strip() for line in text.split("\n")]
    if not any(lines):
        raise ConfigError(name, expected="a prompt on each line", got="no line with text")
    return [line for line in lines if line]


def check_inputs(command: options.Run) -> None:
    """Check, before a model is loaded, that it makes videos from --image or without one.

    Raises:
        SamplingError: It takes no image, or needs one, or the file cannot be read.
    """
    Source("", command.image)
    name = pipeline_class(command.model)
    check_image(name, PIPELINES[name], command.image is not None)


def load(command: options.Run, device: str | None) -> VideoPipeline:
    """Load the pipeline of a command."""
    return load_pipeline(
        command.model,
        dtype=getattr(torch, command.dtype),
        device=device,
        offload=command.offload,
        int8="only" if command.config.linear == "int8-only" else None,
        lora=command.lora,
    )
