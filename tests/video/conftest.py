"""An untrained pipeline, in a folder and loaded as a user would load it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.video.micro import SMALL, micro_pipe, save
from turbo_rcm_patch.files import atomic
from turbo_rcm_patch.video import clips
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.settings import Settings


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(micro_pipe(), tmp_path_factory.mktemp("model") / "micro")


@pytest.fixture(scope="session")
def pipe(micro_folder: Path):
    """bf16 transformer, fp32 VAE. Tests leave it as they found it."""
    pipe = load_pipeline(micro_folder, device="cpu")
    with pipe.transformer.cache_context("cond"):  # diffusers keeps a registry from here on
        return pipe


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(sampler="rcm", steps=2, guidance_scale=1.0, **SMALL)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Before the other fixtures of the session: a comparison knows how many threads it ran on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def undrawn() -> Iterator[None]:
    """Videos are digests of their frames, and the page is compiled once. These take most of the
    time of a comparison of small videos."""
    from jinja2 import Environment

    compiled: dict[str, Any] = {}

    def digest(frames: np.ndarray, path: Path, *_: float, **__: int) -> None:
        with atomic(path) as temporary:
            temporary.write_bytes(sha256(frames.tobytes()).digest())

    def compile_once(jinja: Environment, source: str, name: str, *file: str) -> Any:
        if source not in compiled:
            compiled[source] = really_compile(jinja, source, name, *file)
        return compiled[source]

    really_compile = Environment.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "write_mp4", digest)
        patch.setattr(Environment, "compile", compile_once)
        yield


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """For a test that looks at no video of a comparison."""
    with undrawn():
        yield


@pytest.fixture(scope="module")
def no_pictures_here() -> Iterator[None]:
    """For a module whose fixtures compare, too."""
    with undrawn():
        yield
