"""A model with SLA stays one, however it is loaded and saved, or it says that it is none."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.checkpoints.test_extra import PLAIN
from tests.checkpoints.wan_model import SLA, converted, load, run
from tests.measures import relative_l2
from tests.video import micro
from turbo_rcm_patch import load_extra, patch_model, patched, unload_extra
from turbo_rcm_patch.checkpoints import EXTRA_FILE, write_checkpoint
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.video import load_pipeline

STOCK = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def expected(sla_folder: Path) -> torch.Tensor:
    """The output of the model with its proj_l attached by hand."""
    model = load(sla_folder)
    load_extra(model, sla_folder)
    with patched(model, PLAIN):
        return run(model)


@pytest.fixture
def folder(sla_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(sla_folder, tmp_path / "transformer"))


def published_by_others(folder: Path) -> None:
    """As converters that keep TurboDiffusion's module names write it: no file beside the weights,
    no mark, and `proj_l` among the weights."""
    weights = load_file(folder / STOCK)
    for key, tensor in load_file(folder / EXTRA_FILE).items():
        if ".proj_l." in key:
            weights[key.replace(".proj_l.", ".attn_op.local_attn.proj_l.")] = tensor
    save_file(weights, folder / STOCK, metadata={"format": "pt"})
    (folder / EXTRA_FILE).unlink()
    unmark(folder)


def unmark(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if "turbo" not in key}
    (folder / "config.json").write_text(json.dumps(kept))


def pipeline_of(folder: Path, *more: Path) -> Path:
    """A pipeline folder around a converted transformer, which is moved into it."""
    root = folder.parent / "pipeline"
    micro.save(micro.micro_pipe(experts=bool(more)), root)
    for name, part in zip(("transformer", "transformer_2"), (folder, *more), strict=False):
        shutil.rmtree(root / name)
        shutil.copytree(part, root / name)
    return root


def test_a_stock_class_loses_it_and_is_refused(folder: Path, expected: torch.Tensor) -> None:
    """Patching says what to do; attached, the model is as `load_pipeline` loads it."""
    root = pipeline_of(folder)
    stock = WanPipeline.from_pretrained(root, local_files_only=True)
    with pytest.raises(CheckpointError, match=r"SLA in 2 attentions.*load_extra.*unload_extra"):
        patch_model(stock, PLAIN)
    load_extra(stock.transformer, root)
    for pipe in (stock, load_pipeline(root, dtype=torch.float32, device="cpu")):
        assert relative_l2(run(pipe.transformer.eval()), expected) > 0.05, "unpatched is dense"
        with patched(pipe, PLAIN) as report:
            assert "proj_l" in str(report)
            assert torch.equal(run(pipe.transformer), expected)


def test_two_experts_get_their_own(tmp_path: Path) -> None:
    parts = [converted(SLA, tmp_path, f"expert{seed}", seed=seed) for seed in (1, 2)]
    root = pipeline_of(*parts)
    pipe: Any = load_pipeline(root, dtype=torch.float32, device="cpu")
    for name, part in zip(("transformer", "transformer_2"), parts, strict=True):
        alone, inside = load(part), getattr(pipe, name)
        load_extra(alone, part)
        with patched(alone, PLAIN), patched(inside, PLAIN):
            assert torch.equal(run(inside), run(alone))
    wrong = WanTransformer3DModel.from_pretrained(root, subfolder="transformer_2")
    with pytest.raises(CheckpointError, match="each has its own"):
        load_extra(wrong, root / "transformer")


def test_folders_that_others_converted(folder: Path, expected: torch.Tensor, tmp_path) -> None:
    published_by_others(folder)
    model = load(folder)
    load_extra(model, folder)
    with sla_as_defined(model, 0.1) as count:
        assert count == SLA.layers
    pipe: Any = load_pipeline(pipeline_of(folder), dtype=torch.float32, device="cpu")
    for one in (model, pipe.transformer):
        with patched(one, PLAIN):
            assert torch.equal(run(one), expected)
    write_checkpoint(folder, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    key = "{}.attn_op.local_attn.proj_l.bias"
    theirs = load_file(folder / STOCK)[key.format("blocks.1.attn1")]
    assert torch.equal(back[key.format("blocks.1.self_attn")], theirs)


def test_a_saved_pipeline_keeps_it(folder: Path, expected: torch.Tensor) -> None:
    root, again = pipeline_of(folder), folder.parent / "again"
    pipe: Any = load_pipeline(root, dtype=torch.float32, device="cpu")
    pipe.save_pretrained(again, max_shard_size="1MB")
    assert len(list((again / "transformer").glob("*-of-*"))) > 1, "the option arrived"
    shutil.rmtree(root)
    for _ in range(2):
        loaded: Any = load_pipeline(again, dtype=torch.float32, device="cpu")
        assert attached_int8(loaded.transformer.blocks[0].ffn.net[2]) is not None
        with patched(loaded, PLAIN):
            # One row times a matrix rounds by where the matrix lies in memory.
            assert relative_l2(run(loaded.transformer), expected) < 1e-5
            again = folder.parent / "once more"
            loaded.save_pretrained(again)


def test_a_lost_file_is_refused(folder: Path, tmp_path: Path) -> None:
    root = pipeline_of(folder)
    (root / "transformer" / EXTRA_FILE).unlink()
    with pytest.raises(ModelFolderError, match="has no turbo_extra.safetensors"):
        load_pipeline(root, device="cpu")
    model = load(root / "transformer")
    before = run(model)
    unload_extra(model)  # Dense attention is meant.
    with patched(model, PLAIN) as report:
        assert "proj_l" not in str(report) and relative_l2(run(model), before) < 0.02
    model.save_pretrained(tmp_path / "dense")
    with patched(load(tmp_path / "dense"), PLAIN):
        pass


def test_a_damaged_file_is_named(folder: Path) -> None:
    extra = folder / EXTRA_FILE
    extra.write_bytes(extra.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"turbo_extra.safetensors is missing, damaged"):
        load_extra(load(folder), folder)


def test_the_file_of_other_weights_is_not_taken(folder: Path, sla_folder: Path) -> None:
    """A dense model saved over a converted folder, an extra file of other weights, and one that
    lacks a bias."""
    config = {k: v for k, v in load(folder).config.items() if not k.startswith("_")}
    WanTransformer3DModel(**config).save_pretrained(folder)
    assert (folder / EXTRA_FILE).is_file()
    with patched(load(folder), PLAIN) as report:
        assert "proj_l" not in str(report)
    with pytest.raises(CheckpointError, match="other weights have left them"):
        load_extra(load(folder), folder)
    shutil.rmtree(folder)
    shutil.copytree(sla_folder, folder)
    extra = {key: tensor + 0 for key, tensor in load_file(folder / EXTRA_FILE).items()}
    bias = extra.pop("blocks.1.attn1.proj_l.bias")
    for change, text in (
        ({"blocks.1.attn1.proj_l.bias": bias + 1}, "those that config.json beside it marks"),
        ({}, "a weight and a bias"),
    ):
        save_file(extra | change, folder / EXTRA_FILE, metadata={"turbo_rcm_patch": "2"})
        with pytest.raises(CheckpointError, match=text):
            load_extra(load(folder), folder)


def test_a_copy_saves_its_own(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    load_extra(model, folder)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].attn1.to_q.weight.zero_()
    twin.save_pretrained(tmp_path / "twin")
    again = load(tmp_path / "twin")
    assert not again.blocks[0].attn1.to_q.weight.any()
    assert len(load_extra(again, tmp_path / "twin").proj_l) == 2
    unload_extra(model)
    assert "save_pretrained" not in model.__dict__


def test_going_back_without_it_is_warned_about(folder: Path, tmp_path, caplog) -> None:
    (folder / EXTRA_FILE).unlink()
    write_checkpoint(folder, tmp_path / "back.pth")
    assert "says that the model has SLA" in caplog.text
