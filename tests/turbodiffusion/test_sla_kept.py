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

from tests.measures import relative_l2
from tests.turbodiffusion.test_extra import PLAIN, load
from tests.turbodiffusion.wan_model import Options, save
from tests.video import micro
from turbo_rcm_patch import PatchConfig, find_pairs, load_extra, patch_model, patched, unload_extra
from turbo_rcm_patch import unpatch_model as unpatch
from turbo_rcm_patch.errors import CheckpointError, ModelFolderError, NothingToPatchError
from turbo_rcm_patch.patching import patch as patch_file
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE, write_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer
from turbo_rcm_patch.video import load_pipeline

OPTIONS = Options("sla-quant", quant=True, sla=True, text=32, dtype=torch.bfloat16)
STOCK = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sla")
    save(OPTIONS, place / "in.pth")
    convert_transformer(place / "in.pth", place / "folder")
    return place / "folder"


@pytest.fixture(scope="module")
def expected(converted: Path) -> torch.Tensor:
    """What the model gives with its proj_l attached by hand."""
    model = load(converted)
    load_extra(model, converted)
    with patched(model, PLAIN):
        return output(model)


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(converted, tmp_path / "transformer"))


@torch.no_grad()
def output(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 4, 3, 8, 8, generator=generator)
    text = torch.randn(1, 7, 32, generator=generator)
    return model(x, torch.tensor([500]), text, return_dict=False)[0]


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


def test_a_stock_class_loads_it_and_patching_finds_the_proj_l(
    folder: Path, expected: torch.Tensor
) -> None:
    model = load(folder)
    before, inside = output(model), contents(model)
    table = str(find_pairs(model))
    assert "attn1.proj_l" in table and contents(model) == inside
    report = patch_model(model, PLAIN)
    assert "sla_topk=0.1" in str(report)
    assert torch.equal(output(model), expected)
    unpatch(model)
    assert contents(model) == inside and torch.equal(output(model), before)
    assert relative_l2(before, expected) > 0.05


def contents(model: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"config": dict(model.config)}
    for name, module in model.named_modules():
        result[name] = (sorted(module.__dict__), sorted(module._buffers))
    return result


def test_a_pipeline_of_the_stock_class(folder: Path, expected: torch.Tensor) -> None:
    pipe = WanPipeline.from_pretrained(pipeline_of(folder), local_files_only=True)
    patch_model(pipe, PLAIN)
    assert torch.equal(output(pipe.transformer.eval()), expected)


def test_subfolders_of_two_experts_get_their_own(tmp_path: Path) -> None:
    parts, outputs = [], []
    for seed in (1, 2):
        save(OPTIONS, tmp_path / "in.pth", seed=seed)
        convert_transformer(tmp_path / "in.pth", tmp_path / f"expert{seed}")
        parts.append(tmp_path / f"expert{seed}")
        model = load(parts[-1])
        load_extra(model, parts[-1])
        with patched(model, PLAIN):
            outputs.append(output(model))
    root = pipeline_of(*parts)
    for name, right in zip(("transformer", "transformer_2"), outputs, strict=True):
        model = WanTransformer3DModel.from_pretrained(root, subfolder=name).eval()
        with patched(model, PLAIN):
            assert torch.equal(output(model), right)
    wrong = WanTransformer3DModel.from_pretrained(root, subfolder="transformer_2")
    with pytest.raises(CheckpointError, match="each has its own"):
        load_extra(wrong, root / "transformer")
    for name in ("transformer", "transformer_2"):
        published_by_others(root / name)
    model = WanTransformer3DModel.from_pretrained(root, subfolder="transformer")
    with pytest.raises(CheckpointError, match="two experts have SLA"):
        patch_model(model, PLAIN)
    load_extra(model, root / "transformer")
    patch_model(model, PLAIN)


def test_what_others_published(folder: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    published_by_others(folder)
    model = load(folder)
    with patched(model, PLAIN):
        assert torch.equal(output(model), expected)
    with sla_as_defined(model, 0.1) as count:
        assert count == OPTIONS.layers
    pipe = load_pipeline(pipeline_of(folder), dtype=torch.float32, device="cpu")
    with patched(pipe, PLAIN):
        assert torch.equal(output(pipe.transformer), expected)
    write_checkpoint(folder, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    key = "{}.attn_op.local_attn.proj_l.bias"
    theirs = load_file(folder / STOCK)[key.format("blocks.1.attn1")]
    assert torch.equal(back[key.format("blocks.1.self_attn")], theirs)


@pytest.mark.parametrize("by", ["load_pipeline", "the stock class, patched"])
def test_a_saved_pipeline_keeps_it(by: str, folder: Path, expected: torch.Tensor) -> None:
    root, again = pipeline_of(folder), folder.parent / "again"
    if by == "load_pipeline":
        pipe: Any = load_pipeline(root, dtype=torch.float32, device="cpu")
        pipe.save_pretrained(again, max_shard_size="1MB")
        assert len(list((again / "transformer").glob("*-of-*"))) > 1  # The option arrived.
    else:
        pipe = WanPipeline.from_pretrained(root, local_files_only=True)
        patch_model(pipe, PLAIN)
        pipe.save_pretrained(again)
    shutil.rmtree(root)
    for _ in range(2):
        loaded = load_pipeline(again, dtype=torch.float32, device="cpu")
        held = attached_int8(loaded.transformer.blocks[0].ffn.net[2])
        assert (held is not None) == (by == "load_pipeline")
        with patched(loaded, PLAIN):
            # One row times a matrix rounds by where the matrix lies in memory.
            assert relative_l2(output(loaded.transformer), expected) < 1e-5
        again = folder.parent / "once more"
        loaded.save_pretrained(again)


def test_a_copy_saves_its_own(folder: Path, tmp_path: Path, expected: torch.Tensor) -> None:
    model = load(folder)
    load_extra(model, folder)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].attn1.to_q.weight.zero_()
    twin.save_pretrained(tmp_path / "twin")
    again = load(tmp_path / "twin")
    assert not again.blocks[0].attn1.to_q.weight.any()
    with patched(again, PLAIN):
        assert attached_proj_l(again.blocks[0].attn1) is not None
    unload_extra(model)
    assert "save_pretrained" not in model.__dict__


def test_lost_ones_are_refused(folder: Path, tmp_path: Path) -> None:
    root = pipeline_of(folder)
    (root / "transformer" / EXTRA_FILE).unlink()
    model = load(root / "transformer")
    for call in (lambda: patch_model(model, PLAIN), lambda: find_pairs(model)):
        with pytest.raises(CheckpointError, match=r"SLA in 2 attentions.*lost.*unload_extra"):
            call()
    with pytest.raises(ModelFolderError, match="has no turbo_extra.safetensors"):
        load_pipeline(root, device="cpu")
    before = output(model)
    unload_extra(model)  # Dense attention is meant.
    with patched(model, PLAIN) as report:
        assert "sla" not in str(report) and relative_l2(output(model), before) < 0.02
    model.save_pretrained(tmp_path / "dense")
    with patched(load(tmp_path / "dense"), PLAIN):
        pass


def test_going_back_without_it_is_warned_about(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / EXTRA_FILE).unlink()
    write_checkpoint(folder, tmp_path / "back.pth")
    assert "says that the model has SLA" in caplog.text


def test_a_stock_copy_leads_back_to_the_converted_folder(
    folder: Path, tmp_path: Path, expected: torch.Tensor
) -> None:
    load(folder).save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / EXTRA_FILE).exists()
    with patched(load(tmp_path / "copy"), PLAIN) as report:
        assert "sla_topk" in str(report)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="proj_l are missing"):
        patch_model(load(tmp_path / "copy"), PLAIN)


def test_what_other_weights_left_is_not_taken(folder: Path, converted: Path) -> None:
    """A dense model saved over a converted folder, and an extra file of other weights."""
    config = {k: v for k, v in load(folder).config.items() if not k.startswith("_")}
    dense = WanTransformer3DModel(**config)
    dense.save_pretrained(folder)
    assert (folder / EXTRA_FILE).is_file()
    with patched(load(folder), PLAIN) as report:
        assert "sla" not in str(report)
    with pytest.raises(CheckpointError, match="other weights have left them"):
        load_extra(load(folder), folder)
    shutil.rmtree(folder)
    shutil.copytree(converted, folder)
    extra = {key: tensor + 0 for key, tensor in load_file(folder / EXTRA_FILE).items()}
    extra["blocks.1.attn1.proj_l.bias"] += 1
    save_file(extra, folder / EXTRA_FILE, metadata={"turbo_rcm_patch": "2"})
    model = load(folder)
    with pytest.raises(CheckpointError, match="proj_l are missing"):
        patch_model(model, PLAIN)
    with pytest.raises(CheckpointError, match="those that config.json beside it marks"):
        load_extra(model, folder)


def test_folders_from_before_the_mark(folder: Path, expected: torch.Tensor) -> None:
    extra = load_file(folder / EXTRA_FILE)
    save_file(extra, folder / EXTRA_FILE, metadata={"turbo_rcm_patch": "1"})
    unmark(folder)
    model = load(folder)
    with patched(model, PLAIN):
        assert torch.equal(output(model), expected)
    load_extra(model, folder)
    with patched(model, PLAIN):
        assert torch.equal(output(model), expected)


def test_nothing_is_half_attached(folder: Path) -> None:
    extra = load_file(folder / EXTRA_FILE)
    extra["blocks.7.attn1.proj_l.weight"] = extra["blocks.0.attn1.proj_l.weight"].clone()
    extra["blocks.7.attn1.proj_l.bias"] = extra["blocks.0.attn1.proj_l.bias"].clone()
    save_file(extra, folder / EXTRA_FILE, metadata={"turbo_rcm_patch": "1"})
    unmark(folder)
    model = load(folder)
    inside = contents(model)
    with pytest.raises(CheckpointError, match=r"proj_l of blocks\.7\.attn1"):
        patch_model(model, PLAIN)
    assert contents(model) == inside


def test_a_patch_that_is_refused_leaves_none_behind(folder: Path) -> None:
    model = load(folder)
    inside = contents(model)
    with pytest.raises(NothingToPatchError):
        patch_model(model, PatchConfig(kinds=("image",)))
    assert contents(model) == inside


def test_a_copy_of_a_patched_one_is_undone_on_its_own(
    folder: Path, expected: torch.Tensor
) -> None:
    model = load(folder)
    before = output(model)
    patch_model(model, PLAIN)
    twin = copy.deepcopy(model)
    unpatch(twin)
    assert attached_proj_l(twin.blocks[0].attn1) is None and torch.equal(output(twin), before)
    assert torch.equal(output(model), expected)
    unpatch(model)
    assert torch.equal(output(model), before)


def test_taking_it_from_a_patched_one_is_final(folder: Path) -> None:
    model = load(folder)
    with patched(model, PLAIN) as report:
        sparse = output(model)
        unload_extra(model)
        assert "sparse" not in str(report.pairs) and not torch.equal(output(model), sparse)
    with patched(model, PLAIN) as report:
        assert "sparse" not in str(report.pairs)
    load_extra(model, folder)
    with patched(model, PLAIN):
        assert torch.equal(output(model), sparse)


def test_a_hub_s_extra_file_is_fetched(
    folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of a pipeline fetches only what its classes know."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    from turbo_rcm_patch.video import load as module

    root = pipeline_of(folder)
    kept = folder.parent / "hub"
    kept.mkdir()
    (root / "transformer" / EXTRA_FILE).rename(kept / EXTRA_FILE)
    pipe = WanPipeline.from_pretrained(root, local_files_only=True)
    asked: list[Any] = []

    def download(repository: str, file: str, **more: Any) -> str:
        asked.append((repository, file))
        shutil.copy(kept / EXTRA_FILE, root / "transformer" / EXTRA_FILE)
        return str(root / file)

    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    def absent(*_: Any, **__: Any) -> str:
        raise EntryNotFoundError("404")

    for answer, text in ((offline, "could not be fetched"), (absent, "with its proj_l")):
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", answer)
        with pytest.raises(ModelFolderError, match=text):
            module._attach_extra(pipe.transformer, "me/sla", "transformer", int8=True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    module._attach_extra(pipe.transformer, "me/sla", "transformer", int8=True)
    assert asked == [("me/sla", f"transformer/{EXTRA_FILE}")]
    with patched(pipe, PLAIN):
        assert torch.equal(output(pipe.transformer.eval()), expected)


def test_a_dense_model_of_the_hub_asks_for_nothing_more_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    from turbo_rcm_patch.video import load as module

    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    pipe = micro.micro_pipe()
    module._attach_extra(pipe.transformer, "me/dense", "transformer", int8=True)
    assert attached_proj_l(pipe.transformer.blocks[0].attn1) is None


def test_a_patch_that_fails_takes_back_what_it_recovered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    before, inside = output(model), contents(model)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("plan_all", "_record", "_report"):
        with monkeypatch.context() as patches:
            patches.setattr(f"turbo_rcm_patch.patching.patch.{name}", fails)
            with pytest.raises(KeyboardInterrupt):
                patch_model(model, PLAIN)
        assert contents(model) == inside, name
        assert torch.equal(output(model), before)


def test_the_first_expert_is_as_before_if_the_second_cannot_be_recovered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [load(folder) for _ in range(2)]
    inside = [contents(model) for model in models]
    pipe = type("Pipe", (), {"transformer": models[0], "transformer_2": models[1]})()
    real = patch_file.recover_proj_l

    def second_fails(model: Any, path: str = "") -> Any:
        if model is models[1]:
            raise KeyboardInterrupt
        return real(model, path)

    monkeypatch.setattr(patch_file, "recover_proj_l", second_fails)
    with pytest.raises(KeyboardInterrupt):
        patch_model(pipe, PLAIN)
    assert [contents(model) for model in models] == inside


def test_a_dense_model_of_a_folder_saves_itself_as_its_class_does(tmp_path: Path) -> None:
    """Nothing was recovered, so there is nothing that its `save_pretrained` would lose."""
    micro.save(micro.micro_pipe(), tmp_path)
    model = WanTransformer3DModel.from_pretrained(tmp_path / "transformer")
    with patched(model, PLAIN):
        assert "save_pretrained" not in vars(model)
