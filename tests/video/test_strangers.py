"""Files from strangers: typed errors at once, and nothing of them reaches a terminal."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.video.micro import TRANSFORMER, micro_pipe
from tests.video.test_lora import LINEARS, write_lora
from turbo_rcm_patch.checkpoints.extra_file import stored_tensors
from turbo_rcm_patch.errors import (
    CheckpointError,
    ModelFolderError,
    SamplingError,
    TurboRCMError,
)
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.lora import add_loras
from turbo_rcm_patch.video.source import read_image


@contextmanager
def at_once(seconds: int = 20) -> Iterator[None]:
    """Fail, and do not wait, if a block takes longer."""

    def late(*_: Any) -> None:
        raise AssertionError("it waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe_at(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def device_at(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    return path


@pytest.fixture
def folder(micro_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(micro_folder, tmp_path / "model"))


@pytest.mark.parametrize("kind", [pipe_at, device_at])
@pytest.mark.parametrize(
    "name",
    ["model_index.json", "vae/config.json", "turbo_rcm.json",
     "transformer/diffusion_pytorch_model.safetensors"],
)  # fmt: skip
def test_only_regular_files_of_a_folder_are_opened(name, kind, folder) -> None:
    kind(folder / name)
    with at_once():
        if name == "turbo_rcm.json":
            assert load_pipeline(folder, device="cpu")  # It holds defaults alone.
        else:
            with pytest.raises(ModelFolderError):
                load_pipeline(folder, device="cpu")


@pytest.mark.parametrize("kind", [pipe_at, device_at])
def test_only_regular_files_are_opened(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    with at_once():
        with pytest.raises(SamplingError, match="a regular file"):
            read_image(kind(tmp_path / "image.png"))
        with pytest.raises(CheckpointError, match="a regular file"):
            stored_tensors(kind(tmp_path / "extra.safetensors"))
        (tmp_path / "lora").mkdir()
        file = kind(tmp_path / "lora" / "a.safetensors")
        for given in (file, file.parent):
            with pytest.raises(ModelFolderError, match="a regular file"):
                add_loras(micro_pipe(), [str(given)])


def test_names_from_files_send_nothing_to_a_terminal() -> None:
    evil = "\x1b]0;owned\x07 \x9b31m \u202etxt\r"
    error = TurboRCMError(f"a {evil}\nline", expected=evil, got=evil, remedy=evil)
    for text in (str(error), error.block(), error.got):
        assert not set(text) & set("\x1b\x07\x9b\u202e\r")
    assert "\\x1b]0;owned\\x07" in str(error)
    assert "\nline" in error.what


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        ("`guard=False`", "--no-guard"),
        ("`fresh=True`", "--fresh"),
        ("`network_number=False`", "--no-network-number"),
        ("`sampler='scheduler'`", "--sampler scheduler"),
        ("`steps=4`", "--steps 4"),
        ("`out=`", "--out"),
    ],
)
def test_a_remedy_names_the_option_that_the_reader_can_type(python: str, typed: str) -> None:
    error = TurboRCMError("a thing", got=python, remedy=f"Give {python}, or `make(seed)`")
    assert f"Give {python}, or `make(seed)`." in str(error)
    assert f"Give {typed}, or `make(seed)`" in error.block() and python in error.block()


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of a model with one block more than the pipeline's."""
    deeper = WanTransformer3DModel(**TRANSFORMER | {"num_layers": TRANSFORMER["num_layers"] + 1})
    return write_lora(tmp_path_factory.mktemp("lora") / "deep.safetensors", deeper)


def noted(path: Path, tensors: dict[str, torch.Tensor], **notes: object) -> str:
    """Write a LoRA with notes for peft in its metadata."""
    notes = {"r": 4, "lora_alpha": 4, "target_modules": LINEARS} | notes
    text = json.dumps({f"transformer.{name}": value for name, value in notes.items()})
    save_file(tensors, path, metadata={"format": "pt", "lora_adapter_metadata": text})
    return str(path)


def test_a_lora_that_fits_some_layers_says_how_many(lora: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        add_loras(micro_pipe(), [str(lora)])
    layers = TRANSFORMER["num_layers"]
    whole = len(load_file(lora))
    assert f"{whole * layers // (layers + 1)} of its {whole} weights fit" in caplog.text
    assert f"transformer.blocks.{layers}." in caplog.text
    assert f"transformer.blocks.{layers - 1}." not in caplog.text


def test_a_lora_that_fits_with_the_names_that_diffusers_writes_is_taken(tmp_path, caplog) -> None:
    pipe = micro_pipe()
    path = write_lora(tmp_path / "a.safetensors", pipe.transformer)
    plain = {"bias": "none", "base_model_name_or_path": "owner/name", "peft_type": "LORA",
             "rank_pattern": {"^blocks\\.0\\.attn1\\.to_q$": 4}}  # fmt: skip
    with caplog.at_level(logging.WARNING):
        add_loras(pipe, [noted(path, load_file(path), **plain)])
    assert not caplog.text
    assert any("lora" in name for name, _ in pipe.transformer.named_parameters())


@pytest.mark.parametrize("named", [True, False])
def test_a_lora_that_fits_no_layer_is_refused(named: bool, lora: Path, tmp_path: Path) -> None:
    """With the names of the Linears in its metadata peft finds some, and gives them no weights."""
    deep = f"blocks.{TRANSFORMER['num_layers']}"
    tensors = {name: tensor for name, tensor in load_file(lora).items() if deep in name}
    path = tmp_path / "none.safetensors"
    if named:
        noted(path, tensors)
    else:
        save_file(tensors, path)
    pipe = micro_pipe()
    with pytest.raises(ModelFolderError):
        add_loras(pipe, [str(path)])


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_a_regular_expression_in_a_lora_is_not_run(key: str, lora: Path, tmp_path: Path) -> None:
    pattern = "(([a-z0-9_.]+)+)+!"
    notes = {key: pattern if key == "target_modules" else {pattern: 4}}
    path = noted(tmp_path / "a.safetensors", load_file(lora), **notes)
    with at_once(15), pytest.raises(ModelFolderError, match="not a plain name"):
        add_loras(micro_pipe(), [path])
