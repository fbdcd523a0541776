"""Loading: what works, and what each broken folder is told."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.patching.models import named
from turbo_rcm_patch import find_pairs
from turbo_rcm_patch.errors import ConfigError, DeviceError, ModelFolderError
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline, load_skeleton, pipeline_class


@pytest.fixture
def broken(micro_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(micro_folder, tmp_path / "broken"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a local path must not touch the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_dtypes_device_and_modes(micro_folder: Path, no_network: None) -> None:
    pipe = load_pipeline(micro_folder, device="cpu")
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert pipe.vae.dtype == torch.float32
    kept = pipe.transformer.blocks[0].scale_shift_table.dtype
    assert kept == torch.float32, "what diffusers keeps in fp32 stays there"
    assert not pipe.transformer.training
    assert not pipe.vae.training
    assert load_pipeline(str(micro_folder), dtype=torch.float32).transformer.dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["./a/b", "/no/such", "~/no/such/model", "one-word", "a/b/c", "file", "empty"]
)
def test_what_is_no_model_is_not_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail())
    (tmp_path / "file").write_text("weights")
    (tmp_path / "empty").mkdir()
    for load in (load_pipeline, load_skeleton):
        with pytest.raises(ModelFolderError):
            load(name)
    with pytest.raises(ModelFolderError, match="diffusers WanPipeline or CogVideoXPipeline"):
        load_pipeline(Path(name))


@pytest.mark.parametrize("cls", ["WanPipeline", "WanDMDPipeline"])
def test_a_model_in_the_hubs_cache_is_a_folder(cls, micro_folder, tmp_path, monkeypatch) -> None:
    """Its settings are read too, and a connection is not needed."""
    from huggingface_hub import constants

    repository = tmp_path / "models--me--video"
    folder = shutil.copytree(micro_folder, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    change(folder / "model_index.json", _class_name=cls)
    (folder / "turbo_rcm.json").write_text('{"height": 64}')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    pipe = load_pipeline("me/video", device="cpu")
    assert type(pipe).__name__ == pipeline_class("me/video") == "WanPipeline"
    assert settings_for(pipe).height == 64
    assert settings_for(pipe).sampler == ("scheduler" if cls == "WanPipeline" else "fastwan")
    assert str(find_pairs(load_skeleton("me/video"))) == str(find_pairs(load_skeleton(folder)))


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


WEIGHTS = "diffusion_pytorch_model.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
#: What is wrong with a folder, how it is made so, and what is said.
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another pipeline": (
        lambda f: change(f / "model_index.json", _class_name="FluxPipeline"), "FluxPipeline"
    ),
    "no vae": (lambda f: shutil.rmtree(f / "vae"), "beside the folders transformer, vae"),
    "no tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), "tokenizer from"),
    "no weights": (lambda f: (f / "vae" / WEIGHTS).unlink(), f"{WEIGHTS[:-12]}.* found in .*/vae"),
    "half the weights": (
        lambda f: os.truncate(f / "transformer" / WEIGHTS, 1000), f"transformer/{WEIGHTS}"
    ),
    "a pointer": (lambda f: (f / "vae" / WEIGHTS).write_text(LFS), "git lfs pull"),
    "no JSON": (
        lambda f: (f / "transformer" / "config.json").write_text("{"),
        r"transformer/config\.json' is not a valid JSON",
    ),
    "nested JSON": (
        lambda f: (f / "vae" / "config.json").write_text("[" * 200_000 + "]" * 200_000),
        "RecursionError",
    ),
    "other sizes": (
        lambda f: change(f / "transformer" / "config.json", ffn_dim=64), "could not be loaded"
    ),
    "one block too few": (
        lambda f: change(f / "transformer" / "config.json", num_layers=3), "transformer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_folder_is_named(fault: str, broken: Path) -> None:
    spoil, said = FAULTS[fault]
    spoil(broken)
    with pytest.raises(ModelFolderError, match=said):
        load_pipeline(broken, device="cpu")


def test_settings_that_cannot_be_read_are_named(broken: Path, monkeypatch) -> None:
    (broken / "turbo_rcm.json").write_text("{}")

    def refuse(path: Path, **_: str) -> str:
        raise OSError(5, "Input/output error", str(path))  # root may read everything

    pipe = load_pipeline(broken, device="cpu")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelFolderError, match=r"rcm\.json cannot be read \(Input/output error"):
        settings_for(pipe)


def test_devices_and_offloading(micro_folder: Path) -> None:
    with pytest.raises(DeviceError, match="a GPU to offload from"):
        load_pipeline(micro_folder, device="cpu", offload="model")
    with pytest.raises(ConfigError, match="sequential"):
        load_pipeline(micro_folder, offload="disk")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype; expected .*torch\.bfloat16; got 'bf16'"):
        load_pipeline(micro_folder, dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="cuda:N"):
        load_pipeline(micro_folder, device="toaster")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="doctor"):
            load_pipeline(micro_folder, device="cuda")


def test_a_skeleton_of_cogvideox_has_the_pairs_of_the_model(no_network: None) -> None:
    loaded = load_pipeline("tiny-cogvideox", device="cpu")
    assert len(find_pairs(load_skeleton("tiny-cogvideox"))) == len(find_pairs(loaded))


def test_a_skeleton_has_shapes_and_no_weights(micro_folder: Path, no_network: None) -> None:
    pipe = load_skeleton(micro_folder)
    assert len(pipe.transformer.blocks) == 2
    assert len(find_pairs(pipe)) == len(find_pairs(load_pipeline(micro_folder, device="cpu")))
    assert all(parameter.is_meta for parameter in pipe.transformer.parameters())
    loaded = load_pipeline(micro_folder, device="cpu").transformer.state_dict()
    found = pipe.transformer.state_dict()
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in loaded.items()}
    with pytest.raises(ModelFolderError, match=r"transformer/config\.json"):
        load_skeleton(micro_folder / "vae")


@pytest.mark.parametrize("name", ["vace", "animate", "chronoedit", "skyreels-masked"])
def test_a_skeleton_is_of_the_class_that_its_folder_names(name: str, tmp_path: Path) -> None:
    model = named(name)
    model.make().save_config(tmp_path / "transformer")
    pipe = load_skeleton(tmp_path)
    assert type(pipe.transformer).__name__ == model.cls
    assert [pair.kind for pair in find_pairs(pipe)] == model.kinds


def test_a_skeleton_of_another_class_is_refused(broken: Path) -> None:
    change(broken / "transformer" / "config.json", _class_name="FluxTransformer2DModel")
    with pytest.raises(ModelFolderError, match=r"FluxTransformer2D.*WanVACETransformer3DModel"):
        load_skeleton(broken)


def test_packages_that_do_not_fit_together_are_no_fault_of_the_folder(
    micro_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    def broken(*_: object, **__: object) -> None:
        why = "because of the following error (look up to see its traceback):"
        raise RuntimeError(
            f"Failed to import diffusers.a {why}\nFailed to import diffusers.b {why}\n"
            "cannot import name 'HybridCache' from 'transformers'"
        )

    monkeypatch.setattr(diffusers.DiffusionPipeline, "load_config", broken)
    with pytest.raises(ModelFolderError) as caught:
        load_pipeline(micro_folder, device="cpu")
    said = str(caught.value)
    assert "cannot import name 'HybridCache'" in said and "look up" not in said
    assert "turbo-rcm-patch doctor" in said and "original folder" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("cannot reach it"), "no connection to the model hub: 'me/wan'"),
        (OSError("no such model"), r"'me/wan' is not a folder here.*no such model.*spelling"),
    ],
)
def test_a_hub_that_fails_is_told(error: Exception, said: str, monkeypatch) -> None:
    import huggingface_hub

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    for load in (load_skeleton, load_pipeline):
        with pytest.raises(ModelFolderError, match=said) as caught:
            load("me/wan")
        assert "download the folder first" in str(caught.value)


def test_a_wheel_without_the_second_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_rcm_patch.tiny.TINY_COGVIDEOX", Path("nowhere"))
    with pytest.raises(ModelFolderError, match=r"no weights of tiny-cogvideox.*clone"):
        load_pipeline("tiny-cogvideox")
