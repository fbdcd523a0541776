"""Names, shapes and bits of a converted checkpoint, for every kind of checkpoint and route.

The oracle for names is diffusers itself: its own converter of Wan's original files, and its class,
which has to find every weight it asks for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

from tests.checkpoints import wan_model
from tests.checkpoints.wan_model import (
    I2V_21,
    OPTIONS,
    Options,
    converted,
    load,
    save,
    state_dict,
)  # fmt: skip
from turbo_rcm_patch.checkpoints import EXTRA_FILE, read_checkpoint
from turbo_rcm_patch.checkpoints import folder as folder_module
from turbo_rcm_patch.checkpoints.convert import convert_transformer
from turbo_rcm_patch.checkpoints.folder import folder_bytes
from turbo_rcm_patch.checkpoints.keys import sizes_of
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError
from turbo_rcm_patch.ops.int8_linear.api import dequantized


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By diffusers' names, as its converter gives them."""
    named = convert_wan_transformer_to_diffusers(dict(state))
    # It does not know the image positions of FLF2V.
    return {
        k.replace("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"): v
        for k, v in named.items()
    }


def expected_weights(options: Options, state: Any, int8_only: bool) -> dict[str, torch.Tensor]:
    others = {k: v for k, v in state.items() if "proj_l" not in k}
    int8, scales, products = {}, {}, {}
    for key in [k for k in others if k.endswith(".int8_weight")]:
        module = key.removesuffix(".int8_weight")
        weight = f"{module}.weight"
        int8[weight], scales[weight] = others.pop(key), others.pop(f"{module}.scale")
        products[weight] = dequantized(int8[weight], scales[weight], options.dtype)
    if not int8_only:
        return renamed(others | products)
    whole, bits = renamed(others | int8), renamed(others | scales)
    of_int8 = [key for key in whole if whole[key].dtype == torch.int8]
    result = {key: tensor for key, tensor in whole.items() if key not in of_int8}
    for key in of_int8:
        result[f"{key}_int8"] = whole[key]
        result[f"{key}_scale_bits"] = bits[key].view(torch.int32)
    return result


ROUTES = [(o, only) for o in OPTIONS for only in (False, True) if o.quant or not only]


@pytest.mark.parametrize(
    ("options", "int8_only"), ROUTES, ids=[f"{o.name}{'-only' * only}" for o, only in ROUTES]
)
def test_every_checkpoint_becomes_what_diffusers_makes_of_it(
    options: Options, int8_only: bool, tmp_path: Path
) -> None:
    state = save(options, tmp_path / "in.pth")
    folder = tmp_path / "folder"
    written = convert_transformer(tmp_path / "in.pth", folder, int8_only=int8_only)
    stock = load_file(folder / "diffusion_pytorch_model.safetensors")
    expected = expected_weights(options, state, int8_only)
    assert stock.keys() == expected.keys()
    for name, tensor in stock.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name].reshape(tensor.shape)), name
    extra = load_file(folder / EXTRA_FILE) if options.sla else {}
    assert (folder / EXTRA_FILE).exists() == options.sla
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, (
        "read by whom may read one"
    )
    for name, tensor in extra.items():
        theirs = name.replace("attn1", "self_attn.attn_op.local_attn")
        assert torch.equal(tensor, state[theirs])

    linears = options.quant * options.layers * (12 if options.image else 10)
    counts = (len(stock), linears * int8_only, linears * (not int8_only))
    assert (written.tensors, written.int8, written.dequantized) == counts
    assert written.sla == (options.layers if options.sla else 0) == len(extra) / 2
    assert ("--int8-only keeps" in str(written)) == (options.quant and not int8_only)
    assert ("--heads N" in written.heads) == (not options.sla), "the shape of proj_l shows them"
    size = sum(tensor.nbytes for tensor in (*stock.values(), *extra.values()))
    assert size == folder_bytes(read_checkpoint(tmp_path / "in.pth"), None, int8_only=int8_only)
    if int8_only:
        assert size == sum(tensor.nbytes for tensor in state.values()), "as the checkpoint"
        with pytest.raises(ValueError, match="turbo_rcm_int8"):
            load(folder)
    else:
        config = load(folder).config
        assert config.num_attention_heads * config.attention_head_dim == options.dim
        assert config.attention_head_dim == options.head_dim
        assert (config.in_channels, config.out_channels) == (options.inputs, options.outputs)
        image = (options.image, options.image_tokens)
        assert (config.image_dim, config.pos_embed_seq_len) == image
        assert config.cross_attn_norm == options.cross_norm


#: Sizes of what TurboDiffusion publishes, and what diffusers' folders of the same Wan models say.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Wan2.1-T2V-1.3B": (
        {"dim": 1536, "ffn": 8960, "inputs": 16},
        {"num_attention_heads": 12, "ffn_dim": 8960, "in_channels": 16},
    ),
    "Wan2.1-T2V-14B": (
        {"dim": 5120, "ffn": 13824, "inputs": 16},
        {"num_attention_heads": 40, "ffn_dim": 13824, "in_channels": 16},
    ),
    "Wan2.1-I2V-14B": (
        {"dim": 5120, "ffn": 13824, "inputs": 36, "image": 1280},
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
    "Wan2.2-I2V-A14B": (
        {"dim": 5120, "ffn": 13824, "inputs": 36, "sla": True},
        {"in_channels": 36, "image_dim": None, "added_kv_proj_dim": None},
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_sizes_are_inferred(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, expected = PUBLISHED[model]
    # Shapes alone: every tensor is one number, expanded.
    monkeypatch.setattr(wan_model.torch, "randn", lambda *s, **_: torch.ones(1).expand(*s))
    monkeypatch.setattr(wan_model, "scaled", lambda x: x)
    options = Options(outputs=16, text=4096, freq=256, layers=3, **sizes)
    config = sizes_of({k: v.shape for k, v in wan_model.state_dict(options).items()}).config()
    everywhere = {"attention_head_dim": 128, "out_channels": 16, "text_dim": 4096, "freq_dim": 256}
    assert config | expected | everywhere | {"num_layers": 3} == config


def test_shards_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(folder_module, "SHARD_BYTES", 2**20)
    progress = lambda *update: seen.append(update)  # noqa: E731
    folder = converted(I2V_21, tmp_path, dtype=torch.bfloat16, progress=progress)
    shards = sorted(folder.glob("*-of-*.safetensors"))
    assert len(shards) > 2 and all(p.stat().st_size < 2**20 + 2**16 for p in shards)
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    tensors = {k: v for path in shards for k, v in load_file(path).items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert seen[-1][1] == seen[-1][2] == index["metadata"]["total_size"]
    model = load(folder, torch.bfloat16)
    for name, tensor in model.state_dict().items():  # Nothing is cast twice, or at all.
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name


WRAPPED = {
    "net": lambda k: f"net.{k}",
    "compiled": lambda k: f"_orig_mod.{k}",
    "head": lambda k: f"net.{k}".replace("head.head", "head._checkpoint_wrapped_module.head"),
    "another program": lambda k: f"model.diffusion_model.{k}",
}


@pytest.mark.parametrize("container", [None, "state_dict"])
@pytest.mark.parametrize("wrap", WRAPPED)
def test_prefixes_are_taken_off(wrap: str, container: str | None, tmp_path: Path) -> None:
    state = state_dict(Options(layers=1))
    wrapped: Any = {WRAPPED[wrap](k): v for k, v in state.items()}
    wrapped["net.blocks.0.self_attn._extra_state"] = None
    torch.save({container: wrapped, "step": 3} if container else wrapped, tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth").tensors.keys() == state.keys()


def test_old_files_convolutions_views_and_fp8_are_read(tmp_path: Path) -> None:
    state = save(Options(), tmp_path / "in.pth")
    both = torch.stack([state["head.head.bias"]] * 2)
    changed = state | {
        "patch_embedding.weight": state["patch_embedding.weight"].reshape(256, 4, 1, 2, 2),
        "head.head.bias": both[1],
    }
    torch.save(changed, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    convert_transformer(tmp_path / "old.pth", tmp_path / "old")
    convert_transformer(tmp_path / "in.pth", tmp_path / "new")
    old, new = (load(tmp_path / name).state_dict() for name in ("old", "new"))
    assert all(torch.equal(old[name], new[name]) for name in new)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        weight = state["blocks.0.ffn.0.weight"].to(dtype)
        torch.save(state | {"blocks.0.ffn.0.weight": weight}, tmp_path / "in.pth")
        convert_transformer(tmp_path / "in.pth", tmp_path / "new", force=True)
        stock = load_file(tmp_path / "new" / "diffusion_pytorch_model.safetensors")
        written = stock["blocks.0.ffn.net.0.proj.weight"]
        assert written.dtype == dtype and torch.equal(written.float(), weight.float())


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    state = save(Options(quant=True), tmp_path / "in.pth")
    del state["blocks.1.ffn.2.bias"]
    state["blocks.0.norm2.weight"] = torch.ones(256)
    state["blocks.0.self_attn.q.scale"] = torch.ones(1, 1)
    state["blocks.0.self_attn.norm_q.weight"] = torch.ones(255)
    state["blocks.1.cross_attn.k.int8_weight"] = torch.ones(256, 256)
    torch.save(state, tmp_path / "in.pth")
    with pytest.raises(CheckpointKeysError) as caught:
        convert_transformer(tmp_path / "in.pth", tmp_path / "folder")
    error = caught.value
    assert error.missing == ("blocks.1.ffn.2.bias float [256]",)
    assert error.unexpected == ("blocks.0.norm2.weight [256]",)
    assert set(error.mismatched) == {
        "blocks.0.self_attn.q.scale: expected float [2, 2], got float32 [1, 1]",
        "blocks.0.self_attn.norm_q.weight: expected float [256], got float32 [255]",
        "blocks.1.cross_attn.k.int8_weight: expected int8 [256, 256], got float32 [256, 256]",
    }
    assert all(text in str(error) for text in (*error.missing, *error.unexpected))
    assert not list(tmp_path.glob("*folder*"))


def test_heads_are_told_or_asked_for(tmp_path: Path) -> None:
    save(Options(dim=192, head_dim=64), tmp_path / "in.pth")
    with pytest.raises(CheckpointError, match="--heads N"):
        read_checkpoint(tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth", heads=3).sizes.head_dim == 64
    with pytest.raises(CheckpointError, match="a divisor of 192"):
        read_checkpoint(tmp_path / "in.pth", heads=5)
    save(Options(sla=True), tmp_path / "sla.pth")
    with pytest.raises(CheckpointKeysError, match="4 mismatched.*proj_l"):
        read_checkpoint(tmp_path / "sla.pth", heads=4)
