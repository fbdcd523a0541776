"""A `-quant` checkpoint with int8 weights alone: in the folder, in memory, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.checkpoints.wan_model import OPTIONS, QUANT, SLA, Options, converted, load, run
from turbo_rcm_patch import load_extra, patch_model, patched
from turbo_rcm_patch.checkpoints import (
    EXTRA_FILE,
    load_int8_only,
    read_checkpoint,
    write_checkpoint,
)
from turbo_rcm_patch.checkpoints.folder import folder_bytes
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.sla import held_proj_l

QUANTS = [option for option in OPTIONS if option.quant and option.name != "t2v-sla-quant"]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def storages(tensors: Iterable[torch.Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def tensor_bytes(folder: Path) -> int:
    files = folder.glob("*.safetensors")
    return sum(t.nbytes for path in files for t in load_file(path).values())


@pytest.mark.parametrize("option", QUANTS, ids=lambda option: option.name)
def test_a_folder_has_the_bytes_of_its_checkpoint_and_goes_back(option: Options, tmp_path) -> None:
    folder = converted(option, tmp_path, int8_only=True)
    state = torch.load(tmp_path / "in.pth", weights_only=True)
    assert tensor_bytes(folder) == sum(tensor.nbytes for tensor in state.values())
    source = read_checkpoint(tmp_path / "in.pth")
    assert tensor_bytes(folder) == folder_bytes(source, None, int8_only=True)
    assert (folder / EXTRA_FILE).is_file() == option.sla
    written = write_checkpoint(folder, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert written.int8 == sum(key.endswith(".int8_weight") for key in state)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name].reshape(tensor.shape), tensor), name
        assert back[name].dtype == tensor.dtype


@pytest.mark.parametrize("sla", [False, True], ids=["dense", "sla"])
def test_it_runs_as_with_products_beside_them(sla: bool, tmp_path: Path) -> None:
    """The same integers and scales, so the same bits; called, the same products."""
    option, dtype = SLA if sla else QUANT, torch.bfloat16
    beside = converted(option, tmp_path)
    stock = load(beside, dtype)
    load_extra(stock, beside)
    expected = [run(stock, dtype)]
    for linear in ("int8", "as-is"):
        with patched(stock, linear=linear):
            expected.append(run(stock, dtype))
    dtypes = {name: p.dtype for name, p in stock.named_parameters()}
    for folder in (beside, converted(option, tmp_path, "only", int8_only=True)):
        model = load_int8_only(folder, dtype)
        if sla:
            load_extra(model, folder, int8=False)
            assert len(held_proj_l(model)) == 2
        assert torch.equal(run(model, dtype), expected[0])
        for linear, truth in (("int8", 1), ("int8-only", 1), ("as-is", 2)):
            with patched(model, linear=linear):
                assert torch.equal(run(model, dtype), expected[truth])
        for name, parameter in model.named_parameters():
            if "weight_int8" not in name and "scale_bits" not in name:
                assert parameter.dtype == dtypes[name], name


@pytest.mark.parametrize("only", [False, True], ids=["with-products", "int8-only"])
def test_no_product_is_kept_in_memory(only: bool, tmp_path: Path) -> None:
    model = load_int8_only(converted(QUANT, tmp_path, int8_only=only))
    linears = {name: m for name, m in model.named_modules() if type(m) is Int8Linear}
    assert len(linears) == 20
    state = torch.load(tmp_path / "in.pth", weights_only=True)
    int8 = sum(t.nbytes for n, t in state.items() if n.endswith((".int8_weight", ".scale")))
    stock = load(converted(QUANT, tmp_path, "stock"), torch.bfloat16)
    products = sum(stock.get_submodule(name).weight.nbytes for name in linears)
    assert storages([*model.parameters(), *model.buffers()]) == int8 - products + storages(
        [*stock.parameters(), *stock.buffers()]
    )


def test_stock_classes_refuse_such_a_folder(tmp_path: Path) -> None:
    folder = converted(QUANT, tmp_path, int8_only=True)
    with pytest.raises(ValueError, match="turbo_rcm_int8"):
        WanTransformer3DModel.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("sla", [False, True], ids=["dense", "sla"])
def test_saved_and_loaded_again(sla: bool, tmp_path: Path) -> None:
    folder = converted(SLA if sla else QUANT, tmp_path, int8_only=True)
    model = load_int8_only(folder)
    if sla:
        load_extra(model, folder, int8=False)
    model.save_pretrained(tmp_path / "saved")
    again = load_int8_only(tmp_path / "saved")
    if sla:
        load_extra(again, tmp_path / "saved", int8=False)
    ours = {"linear": "int8", "guard": False}
    with patched(model, **ours), patched(again, **ours):  # type: ignore[typeddict-item]
        assert torch.equal(run(again, torch.bfloat16), run(model, torch.bfloat16))
    proj_l = [tensor for pair in held_proj_l(model).values() for tensor in pair]
    assert tensor_bytes(tmp_path / "saved") == storages([*model.parameters(), *proj_l])
    write_checkpoint(tmp_path / "saved", tmp_path / "back.pth")
    state, back = (
        torch.load(tmp_path / name, weights_only=True) for name in ("in.pth", "back.pth")
    )
    for name, tensor in state.items():  # The dtype of the others is that of the loaded model.
        own = back[name].dtype
        assert torch.equal(tensor.reshape(-1).to(own), back[name].reshape(-1)), name
        assert own == tensor.dtype or not name.endswith((".int8_weight", ".scale"))


def test_a_model_that_dropped_its_weights_is_saved_and_loaded(tmp_path: Path) -> None:
    """With scales per row, which the format of TurboDiffusion has no place for."""
    model = load(converted(Options(), tmp_path))
    patch_model(model, linear="int8-only", guard=False)
    expected = run(model)
    model.save_pretrained(tmp_path / "saved")
    again = load_int8_only(tmp_path / "saved", torch.float32)
    patch_model(again, linear="int8", guard=False)
    assert torch.equal(run(again), expected)
    with pytest.raises(CheckpointKeysError, match="weight_scale_bits"):
        write_checkpoint(tmp_path / "saved", tmp_path / "back.pth")


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
        ({f"{key}.weight_scale_bits": None}, "int8 and scales of the shape.*with none"),
        ({f"{key}.weight_int8": None}, "missing"),
        ({f"{key}.bias": None}, "missing"),
        ({"blocks.9.bias": torch.zeros(2)}, "unexpected"),
        ({f"{key}.bias": torch.zeros(2)}, "mismatched"),
        ({f"{key}.weight_scale_bits": torch.zeros(2, 7, dtype=torch.int32)}, "of the shape"),
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
