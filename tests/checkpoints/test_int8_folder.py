"""Folders with int8 weights alone: of a `-quant` checkpoint, or of a model that dropped others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.wan_model import QUANT, SLA, Options, converted, load, run
from tests.measures import relative_l2
from turbo_rcm_patch import PatchConfig, load_extra, patch_model, patched
from turbo_rcm_patch.checkpoints import load_int8_only
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.sla import held_proj_l

WEIGHTS = "diffusion_pytorch_model.safetensors"


def storages(tensors: Iterable[torch.Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def load_only(folder: Path, dtype: torch.dtype, sla: bool) -> Any:
    model = load_int8_only(folder, dtype)
    if sla:
        load_extra(model, folder)
        assert len(held_proj_l(model)) == 2
    return model


@pytest.mark.parametrize("sla", [False, True], ids=["dense", "sla"])
def test_it_runs_as_its_products_and_is_saved_and_loaded(sla: bool, tmp_path: Path) -> None:
    """Called or patched as it is, it has the bits of a plain folder; so has a saved one."""
    option, dtype = SLA if sla else QUANT, torch.bfloat16
    plain = converted(option, tmp_path)
    stock = load(plain, dtype)
    if sla:
        load_extra(stock, plain)
    called = run(stock, dtype)
    with patched(stock, linear="as-is"):
        as_is = run(stock, dtype)
    dtypes = {name: p.dtype for name, p in stock.named_parameters()}
    folder = converted(option, tmp_path, "only", int8_only=True)
    model = load_only(folder, dtype, sla)
    model.save_pretrained(tmp_path / "saved")
    if sla:  # It is not in the state dict.
        (tmp_path / "saved" / "turbo_extra.safetensors").hardlink_to(
            folder / "turbo_extra.safetensors"
        )
    in_int8 = []
    for one in (model, load_only(tmp_path / "saved", dtype, sla)):
        assert torch.equal(run(one, dtype), called)
        with patched(one, linear="as-is"):
            assert torch.equal(run(one, dtype), as_is)
        for linear in ("int8", "int8-only"):
            with patched(one, linear=linear):
                in_int8.append(run(one, dtype))
        for name, parameter in one.named_parameters():
            if "weight_int8" not in name and "scale_bits" not in name:
                assert parameter.dtype == dtypes[name], name
    assert all(torch.equal(out, in_int8[0]) for out in in_int8)


def test_their_scales_and_ours_err_alike(tmp_path: Path) -> None:
    """Measured here against the dequantised weights, fp32: 0.0051 of the output with the file's
    integers (activations alone are rounded), 0.0068 if they are quantised again by row."""
    stock = load(converted(QUANT, tmp_path, dtype=torch.float32))
    only = load_int8_only(converted(QUANT, tmp_path, "only", int8_only=True), torch.float32)
    exact = run(stock)
    assert torch.equal(run(only), exact)
    config = PatchConfig(linear="int8", attention="exact", guard=False, impl="reference")
    with patched(stock, config), patched(only, config):
        again, direct = (relative_l2(run(model), exact) for model in (stock, only))
    assert 0 < direct < 0.006 and direct < again < 0.008


def test_no_product_is_kept_in_memory(tmp_path: Path) -> None:
    model = load_int8_only(converted(QUANT, tmp_path, int8_only=True))
    linears = {name: m for name, m in model.named_modules() if type(m) is Int8Linear}
    assert len(linears) == 20
    with pytest.raises(RuntimeError, match="require gradients"):
        model.requires_grad_(True)
    state = torch.load(tmp_path / "in.pth", weights_only=True)
    int8 = sum(t.nbytes for n, t in state.items() if n.endswith((".int8_weight", ".scale")))
    stock = load(converted(QUANT, tmp_path, "stock"), torch.bfloat16)
    products = sum(stock.get_submodule(name).weight.nbytes for name in linears)
    assert storages([*model.parameters(), *model.buffers()]) == int8 - products + storages(
        [*stock.parameters(), *stock.buffers()]
    )


def test_a_model_that_dropped_its_weights_is_saved_and_loaded(tmp_path: Path) -> None:
    """With scales per row, which the format of TurboDiffusion has no place for."""
    model = load(converted(Options(), tmp_path))
    patch_model(model, linear="int8-only", guard=False)
    expected = run(model)
    model.save_pretrained(tmp_path / "saved")
    again = load_int8_only(tmp_path / "saved", torch.float32)
    patch_model(again, linear="int8", guard=False)
    assert torch.equal(run(again), expected)


def test_what_is_no_such_folder_or_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a -quant checkpoint.*--linear int8-only"):
        converted(Options(), tmp_path, "plain", int8_only=True)
    assert not (tmp_path / "plain").exists()
    with pytest.raises(CheckpointError, match="no int8 weights"):
        load_int8_only(converted(Options(), tmp_path, "plain"))
    folder = converted(QUANT, tmp_path, int8_only=True)
    tensors = load_file(folder / WEIGHTS)
    key = "blocks.1.ffn.net.2"
    for change, error in (
        ({f"{key}.weight_scale_bits": None}, "with scales None"),
        ({f"{key}.weight_int8": None}, "missing"),
        ({f"{key}.bias": None}, "missing"),
        ({"blocks.9.bias": torch.zeros(2)}, "unexpected"),
        ({f"{key}.weight": torch.zeros(2)}, "unexpected"),
        ({f"{key}.bias": torch.zeros(2)}, "mismatched"),
        ({f"{key}.weight_scale_bits": torch.zeros(2, 7, dtype=torch.int32)}, "one a row"),
    ):
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(CheckpointError, match=error):
            load_int8_only(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ffn_dim": 64}))
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="a Linear"):
        load_int8_only(folder)
