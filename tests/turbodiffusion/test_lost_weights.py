"""Weights that changed since they were converted, and folders that are not ours to replace."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.turbodiffusion.test_extra import PLAIN, SLA, load, run
from tests.turbodiffusion.wan_model import Options, save, state_dict
from turbo_rcm_patch import load_extra, patched, unload_extra
from turbo_rcm_patch.errors import CheckpointError, OutputExistsError
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE, read_checkpoint, write_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_pipeline, convert_transformer
from turbo_rcm_patch.video import load_int8_only
from turbowan.models import transformer_folder

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANT = Options("quant", quant=True, dtype=torch.bfloat16, layers=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(SLA, tmp_path / "in.pth")
    convert_transformer(tmp_path / "in.pth", tmp_path / "folder")
    return tmp_path / "folder"


def test_int8_weights_of_before_are_not_loaded_for_changed_ones(folder: Path) -> None:
    """A stock class saves over the weights and leaves the extra file as it is."""
    model = load(folder, torch.bfloat16)
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight.mul_(1.1)
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"to_q\.weight is not the product"):
        load_int8_only(folder)
    (folder / EXTRA_FILE).unlink()
    with pytest.raises(CheckpointError, match="no int8 weights"):
        load_int8_only(folder)


def names_of_dtypes(pair: Any) -> str:
    return str(pair).removeprefix("torch.")


@pytest.mark.parametrize("loaded", DTYPES, ids=names_of_dtypes)
@pytest.mark.parametrize("written", DTYPES, ids=names_of_dtypes)
def test_a_folder_in_any_dtype_is_loaded_in_any(
    written: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    """Two roundings: one to the folder's dtype, and one to the model's."""
    save(QUANT, tmp_path / "in.pth")
    convert_transformer(tmp_path / "in.pth", tmp_path / "folder", dtype=written)
    model = load(tmp_path / "folder", loaded)
    assert len(load_extra(model, tmp_path / "folder").int8) == 10
    model.save_pretrained(tmp_path / "saved")
    write_checkpoint(tmp_path / "saved", tmp_path / "back.pth")
    source, back = (torch.load(tmp_path / f"{n}.pth", weights_only=True) for n in ("in", "back"))
    for name in (n for n in source if n.endswith((".int8_weight", ".scale"))):
        assert torch.equal(source[name], back[name]), name


def test_what_is_not_asked_for_is_taken_away(folder: Path) -> None:
    model, dense = load(folder), load(folder)
    unload_extra(dense)
    load_extra(model, folder)
    linear = model.blocks[0].attn1.to_q
    assert len(held_proj_l(model)) == 2 and attached_int8(linear) is not None
    assert load_extra(model, folder, proj_l=False).proj_l == ()
    assert not held_proj_l(model) and attached_int8(linear) is not None
    with patched(model, PLAIN) as report, patched(dense, PLAIN):
        assert "sparse" not in str(report) and torch.equal(run(model), run(dense))
    load_extra(model, folder, int8=False)
    assert len(held_proj_l(model)) == 2 and attached_int8(linear) is None
    with patched(model, PLAIN):
        load_extra(model, folder, proj_l=False)
        with patched(dense, PLAIN):
            assert torch.equal(run(model), run(dense)), "as unload_extra does"


def test_the_scripts_never_replace_a_folder_that_they_did_not_write(tmp_path: Path) -> None:
    save(Options(sla=True, layers=1), tmp_path / "X.pth")
    pipeline = tmp_path / "X-diffusers"
    (pipeline / "vae").mkdir(parents=True)
    (pipeline / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    (pipeline / "vae" / "only.safetensors").write_bytes(b"mine")
    with pytest.raises(OutputExistsError, match=r"already exists.*--cache"):
        transformer_folder(tmp_path / "X.pth")
    assert (pipeline / "vae" / "only.safetensors").read_bytes() == b"mine"


PARTS = ("vae", "text_encoder", "tokenizer")


def pipeline_base(root: Path) -> Path:
    """The least that `--base` takes: configurations, and files of the right names."""
    index: dict[str, Any] = {"_class_name": "WanPipeline"}
    for part in (*PARTS, "transformer"):
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_text("{}")
        index[part] = ["diffusers", "Any"]
        if part in PARTS[:2]:
            save_file({"weight": torch.ones(2)}, root / part / "model.safetensors")
    (root / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (root / "model_index.json").write_text(json.dumps(index))
    return root


@pytest.mark.parametrize("links", ["folders", "files"])
def test_a_base_that_links_into_the_target_is_refused(links: str, tmp_path: Path) -> None:
    save(Options(layers=1), tmp_path / "a.pth")
    base, main, other = (tmp_path / name for name in ("base", "main", "other"))
    convert_pipeline(tmp_path / "a.pth", main, base=pipeline_base(base), copy=True)
    if links == "folders":
        shutil.rmtree(base)
        convert_pipeline(tmp_path / "a.pth", other, base=main)
    else:
        base.rename(other)
        (other / "vae" / "model.safetensors").unlink()
        (other / "vae" / "model.safetensors").symlink_to(main / "vae" / "model.safetensors")
    for copy in (False, True):
        with pytest.raises(OutputExistsError, match="which is read"):
            convert_pipeline(tmp_path / "a.pth", main, base=other, copy=copy, force=True)
    assert load_file(main / "vae" / "model.safetensors")["weight"].sum() == 2
    assert not (main / "vae").is_symlink()


def test_weights_beside_two_networks_are_not_dropped(tmp_path: Path, caplog: Any) -> None:
    """With one network they are refused by name."""
    state = state_dict(Options(layers=1))
    both = {p + k: v for p in ("net.", "net_ema.") for k, v in state.items()}
    lora = {"blocks.0.self_attn.q.lora_A.weight": torch.ones(4, 256)}
    step = {"iteration": torch.tensor(5), "epoch": 3}
    path = tmp_path / "in.pth"
    torch.save(both | lora | step, path)
    with pytest.raises(CheckpointError, match=r"1 unexpected.*lora_A"):
        read_checkpoint(path)
    chosen = read_checkpoint(path, network="net")
    assert chosen.tensors.keys() == state.keys()
    assert f"which are left out: {next(iter(lora))}" in caplog.text
    torch.save(both | step, path)
    caplog.clear()
    assert read_checkpoint(path).tensors.keys() == state.keys()
    assert "left out" not in caplog.text


def test_weights_in_another_container_are_named(tmp_path: Path, caplog: Any) -> None:
    state = state_dict(Options(layers=1))
    weight = torch.ones(4, 256)
    beside = {
        "lora": {"q": {"lora_A": weight, "lora_B": weight}},
        "optimizer": {"state": {0: {"exp_avg": weight}}},
        "optim_states": {"exp_avg": state},
        "rng": {"torch": torch.get_rng_state()},
        "step": torch.tensor(3.0),
        "log": {"module": 1, "_orig_mod": 2},
        "extra_head": weight,
    }
    torch.save({"model": state} | beside, tmp_path / "in.pth")
    read = read_checkpoint(tmp_path / "in.pth")
    assert read.network == "model" and read.others == ()
    assert caplog.text.strip().endswith("which are left out: extra_head, lora.q")
    assert read.tensors.keys() == state.keys()


def test_an_optimizer_by_names_is_no_network(tmp_path: Path) -> None:
    state = state_dict(Options(layers=1))
    moments = {name: {"exp_avg": tensor} for name, tensor in state.items()}
    for key, value in itertools.product(("optimizer", "adam"), ({"state": moments}, moments)):
        torch.save({"model": state, key: value}, tmp_path / "in.pth")
        read = read_checkpoint(tmp_path / "in.pth")
        assert read.network == "model" and read.others == ()
        assert all(torch.equal(read.tensors[name], state[name]) for name in state)


def test_two_names_that_are_one_without_wrappers_are_refused(tmp_path: Path) -> None:
    state = state_dict(Options(layers=1))
    state["_orig_mod.head.head.bias"] = state["head.head.bias"]
    torch.save(state, tmp_path / "in.pth")
    with pytest.raises(CheckpointError, match=r"the same name, head\.head\.bias, once"):
        read_checkpoint(tmp_path / "in.pth")


def test_saving_removes_an_extra_file_that_would_be_of_other_weights(tmp_path: Path) -> None:
    save(QUANT, tmp_path / "in.pth")
    folder = tmp_path / "folder"
    convert_transformer(tmp_path / "in.pth", folder)
    model = load(folder)
    load_extra(model, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks."):
                parameter.mul_(1.1)
    model.save_pretrained(folder)
    assert not (folder / EXTRA_FILE).exists()
    saved = WanTransformer3DModel.from_pretrained(folder, local_files_only=True)
    assert torch.equal(saved.blocks[0].attn1.to_q.weight, model.blocks[0].attn1.to_q.weight)
    (folder / EXTRA_FILE).write_bytes(b"of somebody else")
    model.save_pretrained(folder)
    assert (folder / EXTRA_FILE).read_bytes() == b"of somebody else"
