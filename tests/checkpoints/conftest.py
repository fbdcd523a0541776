"""Converted checkpoints that tests look at and leave as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.wan_model import QUANT, SLA, converted, save


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(QUANT, tmp_path_factory.mktemp("quant"))


@pytest.fixture(scope="session")
def sla_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(SLA, tmp_path_factory.mktemp("sla"))


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    save(SLA, tmp_path / "in.pth")
    return tmp_path / "in.pth"
