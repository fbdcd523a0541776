"""SLA's `proj_l`, which stock classes have no place for: attached, run, removed. A model with SLA
stays one, however it is loaded and saved, or it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.checkpoints.wan_model import SLA, Options, converted, load, run
from tests.measures import relative_l2
from tests.patching import turbodiffusion as stand_in
from tests.video import micro
from turbo_rcm_patch import PatchConfig, load_extra, patch_model, patched, unload_extra
from turbo_rcm_patch.checkpoints import EXTRA_FILE, PROJ_L
from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError, ModelFolderError
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.patching.sla import attached_proj_l, held_proj_l
from turbo_rcm_patch.video import load_pipeline

PLAIN = PatchConfig(guard=False, impl="reference")
STOCK = "diffusion_pytorch_model.safetensors"
#: Relative L2 in fp32: the same sums in another order; and what int8 q and k cost.
BOTH_FUSED, INT8_OFF = 2e-6, 0.02


@pytest.fixture(scope="module")
def expected(sla_folder: Path) -> torch.Tensor:
    """The output of the patched model with its proj_l attached by hand."""
    model = load(sla_folder)
    load_extra(model, sla_folder)
    with patched(model, PLAIN):
        return run(model)


@pytest.fixture
def folder(sla_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(sla_folder, tmp_path / "transformer"))


def pipeline_of(*parts: Path) -> Path:
    """A pipeline folder around converted transformers, which are copied into it."""
    root = parts[0].parent / "pipeline"
    micro.save(micro.micro_pipe(experts=len(parts) > 1), root)
    for name, part in zip(("transformer", "transformer_2"), parts, strict=False):
        shutil.rmtree(root / name)
        shutil.copytree(part, root / name)
    return root


def loaded_pipeline(root: Path) -> Any:
    return load_pipeline(root, dtype=torch.float32, device="cpu")


# Attached, run, removed.


def test_attached_they_change_nothing_until_patched_and_are_removed(sla_folder: Path) -> None:
    """In fp32 after a cast of the model too, as TurboDiffusion keeps them."""
    model = load(sla_folder)
    before, keys = run(model), list(model.state_dict())
    inside = {name: dict(module.__dict__) for name, module in model.named_modules()}
    extra = load_extra(model, sla_folder)
    assert len(extra.proj_l) == 2 and "proj_l of 2 attentions" in str(extra)
    assert torch.equal(run(model), before) and list(model.state_dict()) == keys
    state = torch.load(sla_folder.parent / "in.pth", weights_only=True)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        for i, block in enumerate(model.blocks):
            held = attached_proj_l(block.attn1)
            assert held is not None and attached_proj_l(block.attn2) is None
            for ours, kind in zip(held, ("weight", "bias"), strict=True):
                theirs = state[f"blocks.{i}.self_attn.attn_op.local_attn.proj_l.{kind}"]
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    unload_extra(model)
    assert not any(name.endswith(PROJ_L) for name, _ in model.named_buffers())
    for name, module in model.named_modules():
        assert module.__dict__.keys() == inside[name].keys()


def test_a_patched_model_takes_none_and_gives_them_up(sla_folder: Path) -> None:
    model = load(sla_folder)
    unload_extra(model)  # Dense attention is meant.
    with patched(model, PLAIN) as report:
        dense = run(model)
        assert "proj_l" not in str(report)
        with pytest.raises(AlreadyPatchedError, match="unpatch_model, then load_extra"):
            load_extra(model, sla_folder)
        assert torch.equal(run(model), dense) and not held_proj_l(model)
    load_extra(model, sla_folder)
    with patched(model, PLAIN) as report:
        assert relative_l2(run(model), dense) > 0.05
        assert "proj_l" in str(report)
        unload_extra(model)
        assert torch.equal(run(model), dense)


@pytest.mark.parametrize("head_dim", [128, 64])
def test_the_converted_class_runs_what_theirs_runs(tmp_path: Path, head_dim: int) -> None:
    """A block of TurboDiffusion's WanModel (the stand-in of the patcher tests) and the converted
    one, with the same weights, both patched: fp32, exact but for int8 q and k in both."""
    out = converted(Options(sla=True, head_dim=head_dim), tmp_path, heads=256 // head_dim)
    state = torch.load(tmp_path / "in.pth", weights_only=True)
    ours = load(out)
    load_extra(ours, out)
    theirs = stand_in.WanModel(dim=256, num_heads=256 // head_dim, layers=2, checkpoint=False)
    for block in theirs.blocks:
        block.ffn = torch.nn.Sequential(
            torch.nn.Linear(256, 320), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(320, 256)
        )
        block.self_attn.attn_op.local_attn = stand_in.SparseLinearAttention(head_dim, 0.3)
    of_blocks = {k: v for k, v in state.items() if k.startswith("blocks.")}
    missing = theirs.load_state_dict(of_blocks, strict=False)
    assert not missing.unexpected_keys
    assert not any(name.startswith("blocks.") for name in missing.missing_keys)
    theirs.eval().requires_grad_(False)

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 400, 256, generator=generator)
    text = torch.randn(1, 7, 256, generator=generator)
    e = 0.3 * torch.randn(1, 6, 256, generator=generator)
    angles = torch.rand(400, head_dim // 2, generator=generator) * 6
    wide = angles.repeat_interleave(2, -1)
    rotary = tuple(x[None, :, None] for x in (wide.cos(), wide.sin()))

    @torch.no_grad()
    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        x = y = hidden
        for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
            x = mine(x, text, e, rotary)
            y = other(y, e, None, angles, text, None)
        return x, y

    dense, exact = outputs()
    assert relative_l2(dense, exact) > 0.05
    config = PatchConfig(guard=False, impl="reference", sla_topk=0.3)
    with patched(ours, config), patched(theirs, config):
        x, y = outputs()
        assert relative_l2(x, y) < BOTH_FUSED
        assert 0 < relative_l2(x, exact) < INT8_OFF
    with patched(ours, replace(config, attention="exact")):
        assert relative_l2(outputs()[0], exact) < BOTH_FUSED


# Loaded and saved.


def test_a_stock_class_loses_them_and_is_refused(folder: Path, expected: torch.Tensor) -> None:
    """Patching says what to do; attached, the model is as `load_pipeline` loads it."""
    root = pipeline_of(folder)
    stock = WanPipeline.from_pretrained(root, local_files_only=True)
    with pytest.raises(CheckpointError, match=r"SLA in 2 attentions.*load_extra.*unload_extra"):
        patch_model(stock, PLAIN)
    load_extra(stock.transformer, root)
    for pipe in (stock, loaded_pipeline(root)):
        assert relative_l2(run(pipe.transformer.eval()), expected) > 0.05, "unpatched is dense"
        with patched(pipe, PLAIN) as report:
            assert "proj_l" in str(report)
            assert torch.equal(run(pipe.transformer), expected)


def test_a_folder_without_its_file_is_refused_unless_dense_is_meant(
    folder: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    """As one that was saved: the file is copied beside the weights."""
    again = tmp_path / "again"
    loaded_pipeline(pipeline_of(folder)).save_pretrained(again)
    with pytest.raises(ModelFolderError, match="no turbo_extra.safetensors"):
        load_pipeline(again, device="cpu")
    dense = load(again / "transformer")
    before = run(dense)
    unload_extra(dense)
    with patched(dense, PLAIN) as report:
        assert "proj_l" not in str(report) and relative_l2(run(dense), before) < 0.02
    dense.save_pretrained(tmp_path / "dense")
    with patched(load(tmp_path / "dense"), PLAIN):
        pass
    shutil.copy(folder / EXTRA_FILE, again / "transformer")
    pipe = loaded_pipeline(again)
    with patched(pipe, PLAIN):
        # One row times a matrix rounds by where the matrix lies in memory.
        assert relative_l2(run(pipe.transformer), expected) < 1e-5


def test_two_experts_get_their_own(tmp_path: Path) -> None:
    parts = [converted(SLA, tmp_path, f"expert{seed}", seed=seed) for seed in (1, 2)]
    root = pipeline_of(*parts)
    pipe = loaded_pipeline(root)
    for name, part in zip(("transformer", "transformer_2"), parts, strict=True):
        alone, inside = load(part), getattr(pipe, name)
        load_extra(alone, part)
        with patched(alone, PLAIN), patched(inside, PLAIN):
            assert torch.equal(run(inside), run(alone))
    second = WanTransformer3DModel.from_pretrained(root, subfolder="transformer_2")
    for place, text in ((root / "transformer", "each has its own"), (root, "has two experts")):
        with pytest.raises(CheckpointError, match=text):
            load_extra(second, place)


def test_folders_that_others_converted(folder: Path, expected: torch.Tensor) -> None:
    """No file beside the weights, no mark, and `proj_l` among the weights."""
    weights = load_file(folder / STOCK)
    for key, tensor in load_file(folder / EXTRA_FILE).items():
        weights[key.replace(".proj_l.", ".attn_op.local_attn.proj_l.")] = tensor
    save_file(weights, folder / STOCK, metadata={"format": "pt"})
    (folder / EXTRA_FILE).unlink()
    unmark(folder)
    model = WanTransformer3DModel.from_pretrained(folder).eval()
    load_extra(model, folder)
    with sla_as_defined(model, 0.1) as count:
        assert count == SLA.layers
    for one in (model, loaded_pipeline(pipeline_of(folder)).transformer):
        with patched(one, PLAIN):
            assert torch.equal(run(one), expected)


# Refused.


def unmark(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if "turbo" not in key}
    (folder / "config.json").write_text(json.dumps(kept))


def without_file(folder: Path) -> None:
    (folder / EXTRA_FILE).unlink()
    unmark(folder)


def cut(folder: Path) -> None:
    (folder / EXTRA_FILE).write_bytes((folder / EXTRA_FILE).read_bytes()[:-100])


def dense_over_it(folder: Path) -> None:
    config = {k: v for k, v in load(folder).config.items() if not k.startswith("_")}
    WanTransformer3DModel(**config).save_pretrained(folder)
    with patched(load(folder), PLAIN) as report:
        assert "proj_l" not in str(report)


def another_bias(folder: Path, change: Callable[[torch.Tensor], Any] = lambda x: x + 1) -> None:
    extra = {key: tensor + 0 for key, tensor in load_file(folder / EXTRA_FILE).items()}
    key = "blocks.1.attn1.proj_l.bias"
    changed = extra | {key: change(extra[key])}
    save_file({k: v for k, v in changed.items() if v is not None}, folder / EXTRA_FILE)


def no_bias(folder: Path) -> None:
    another_bias(folder, lambda _: None)


REFUSED = [
    (without_file, f"no proj_l in {EXTRA_FILE}"),
    (cut, r"turbo_extra.safetensors is missing, damaged"),
    (dense_over_it, "other weights have left them"),
    (another_bias, "those that config.json beside it marks"),
    (no_bias, "a weight and a bias"),
]


@pytest.mark.parametrize(("damage", "text"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_a_file_of_other_weights_is_refused(damage: Any, text: str, folder: Path) -> None:
    damage(folder)
    model = load(folder)
    with pytest.raises(CheckpointError, match=text):
        load_extra(model, folder)
    assert not held_proj_l(model)


def test_a_failure_leaves_what_was_attached_before(sla_folder: Path, tmp_path: Path) -> None:
    model = load(sla_folder)
    load_extra(model, sla_folder)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    other = converted(Options(head_dim=64, sla=True), tmp_path)
    unmark(other)
    (other / EXTRA_FILE).rename(other / STOCK)  # as others have them, with no mark to compare
    with pytest.raises(CheckpointError):
        load_extra(model, other)
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(CheckpointError, match="heads of 64"):
        load_extra(load(converted(Options(), tmp_path, "dense")), other)
