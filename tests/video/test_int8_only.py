"""Pipelines with int8 weights alone, and offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from tests.measures import relative_l2
from tests.video.micro import QUICK, SMALL, hooked, micro_pipe, options, save
from turbo_rcm_patch import PatchConfig, keep_int8_only, patched
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.cli.exit_codes import CHANGED, OK
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.video import load
from turbo_rcm_patch.video.generation import generate
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.settings import Settings

PROMPT = "a red circle moves left"
CPU = torch.device("cpu")
SETTINGS = Settings(sampler="rcm", steps=4, guidance_scale=1.0, **SMALL)
CONFIG = PatchConfig(linear="int8-only", guard=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, in bf16."""
    return save(micro_pipe(experts=True), tmp_path_factory.mktemp("experts") / "micro")


def linears(pipe: Any) -> list[Int8Linear]:
    parts = [pipe.transformer, pipe.transformer_2]
    return [m for part in parts if part for m in part.modules() if type(m) is Int8Linear]


def latents(pipe: Any) -> torch.Tensor:
    with patched(pipe, CONFIG) as report:
        made = generate(pipe, PROMPT, settings=SETTINGS)
        assert report.last_forward["fused with int8 attention, int8 Linears"] == 4
    return made.latents


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    pipe = load_pipeline(folder, device="cpu")
    with patched(pipe, linear="int8", guard=False):
        made = generate(pipe, PROMPT, settings=SETTINGS)
    return made.latents


def test_loaded_with_int8_alone_it_generates_the_same(folder, expected) -> None:
    pipe = load_pipeline(folder, device="cpu", int8="only")
    assert len(linears(pipe)) == 40
    assert torch.equal(latents(pipe), expected)


@pytest.mark.parametrize(
    ("offload", "drop"), [("model", "before"), ("model", "after"), ("group", "before")]
)
def test_offloaded_it_generates_the_same(offload, drop, folder, expected) -> None:
    """Both experts take turns; T5 and the VAE are offloaded too."""
    pipe = load_pipeline(folder, device="cpu")
    if drop == "before":
        keep_int8_only(pipe)
    load.move(pipe, CPU, offload)
    assert torch.equal(latents(pipe), expected)
    assert len(linears(pipe)) == 40
    parts = ["vae", "text_encoder", "transformer", "transformer_2"]
    assert hooked(pipe) == dict.fromkeys(parts, True)
    if offload == "group":
        assert pipe.vae.use_tiling


def test_sequentially_the_products_run(folder: Path) -> None:
    pipe = load_pipeline(folder, device="cpu", int8="only")
    products = generate(pipe, PROMPT, settings=SETTINGS).latents
    for part in (pipe.transformer, pipe.transformer_2):
        accelerate.cpu_offload(part, CPU, offload_buffers=True)
    assert all(linear.int8[0].is_meta for linear in linears(pipe))
    with patched(pipe, attention="exact", linear="int8-only", guard=False):
        found = generate(pipe, PROMPT, settings=SETTINGS).latents
    assert relative_l2(found, products) < 0.02


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", ["generate", "compare"])
def test_the_commands_load_int8_alone(command: str, folder: Path, tmp_path: Path) -> None:
    load_pipeline(folder, device="cpu", int8="only").save_pretrained(tmp_path / "saved")
    assert len(linears(load_pipeline(tmp_path / "saved", device="cpu"))) == 40, "without asking"
    for model in (folder, tmp_path / "saved") if command == "generate" else (folder,):
        out = tmp_path / f"{model.name}.{'mp4' if command == 'generate' else 'folder'}"
        given = options(model=model, linear="int8-only", steps=1, prompt=PROMPT, out=out)
        given += ["--no-network-number"] if command == "compare" else []
        assert main([command, *QUICK, *given]) in (OK, CHANGED)
        assert out.is_file() or (out / "report.html").is_file()
