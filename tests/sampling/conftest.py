"""An untrained pipeline, in a folder and loaded as a user would load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sampling.micro import SMALL, micro_pipe, save
from turbo_rcm_patch.sampling.load import load_pipeline
from turbo_rcm_patch.sampling.settings import Settings


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(micro_pipe(), tmp_path_factory.mktemp("model") / "micro")


@pytest.fixture(scope="session")
def pipe(micro_folder: Path):
    """bf16 transformer, fp32 VAE. Tests leave it as they found it."""
    return load_pipeline(micro_folder, device="cpu")


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(steps=2, **SMALL)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Before the other fixtures of the session: a comparison knows how many threads it ran on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
