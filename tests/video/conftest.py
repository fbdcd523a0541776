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
from turbo_rcm_patch.output import atomic
from turbo_rcm_patch.video import clips
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.settings import Settings


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(micro_pipe(), tmp_path_factory.mktemp("model") / "micro")


@pytest.fixture(scope="session")
def pipe(micro_folder: Path):
    """bf16 transformer, fp32 VAE. Tests leave it as they found it."""
    return load_pipeline(micro_folder, device="cpu")


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
def _undrawn() -> Iterator[None]:
    """Plots are made but not drawn, and contact sheets are a digest of their videos: drawing is
    much of the time of a comparison of small videos."""
    from matplotlib.figure import Figure

    empty = b"\x89PNG\r\n\x1a\n"

    def contact_sheet(rows: dict[str, np.ndarray], path: Path) -> None:
        digest = sha256(b"".join(frames.tobytes() for frames in rows.values())).digest()
        with atomic(path) as temporary:
            temporary.write_bytes(empty + digest)

    def savefig(figure: object, file: Any, **how: object) -> None:
        file.write(empty)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "contact_sheet", contact_sheet)
        patch.setattr(Figure, "savefig", savefig)
        yield


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """For a test that looks at no plot and no contact sheet."""
    with _undrawn():
        yield


@pytest.fixture(scope="module")
def no_pictures_here() -> Iterator[None]:
    """For a module whose fixtures compare, too."""
    with _undrawn():
        yield
