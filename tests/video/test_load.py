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
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline, load_skeleton, pipeline_class, resolve_model


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


def test_not_a_model_folder(tmp_path: Path, no_network: None) -> None:
    (tmp_path / "file").write_text("weights")
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "file", "empty"):
        with pytest.raises(ModelFolderError, match=r"diffusers WanPipeline or CogVideoXPipeline"):
            load_pipeline(tmp_path / name)


@pytest.mark.parametrize("name", ["./a/b", "/no/such", "~/no/such/model", "one-word", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(name: str, no_network: None) -> None:
    with pytest.raises(ModelFolderError, match="no such folder.* tiny and tiny-cogvideox.*hub id"):
        load_pipeline(name)


def test_a_mistyped_path_is_not_looked_up(no_network: None, tmp_path, monkeypatch) -> None:
    """Without a connection the hub takes half a minute to say that it has no such model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "turbowan").mkdir(parents=True)
    with pytest.raises(ModelFolderError, match=r"no such folder: models/tubrowan.*got in models/"):
        load_pipeline("models/tubrowan")
    with pytest.raises(ModelFolderError, match="turbowan.*hf download models/tubrowan"):
        load_skeleton("models/tubrowan")
    with pytest.raises(ModelFolderError, match=r"no such folder: checkpoints/wan\.pth"):
        load_pipeline("checkpoints/wan.pth")


def test_what_the_hubs_cache_holds_is_an_id(tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    (tmp_path / "Wan-AI").mkdir()
    (tmp_path / "cache" / "models--Wan-AI--Wan2.1").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve_model("Wan-AI/Wan2.1") == "Wan-AI/Wan2.1"
    with pytest.raises(ModelFolderError):
        resolve_model("Wan-AI/Wan2.2")


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
    assert len(find_pairs(load_skeleton("me/video"))) == len(find_pairs(pipe))


def test_hub_ids_are_recognised_and_failures_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline

    assert resolve_model("Wan-AI/Wan2.1-T2V-1.3B-Diffusers") == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    assert resolve_model("tiny") == TINY_WAN
    calls = []

    def offline(name: str, **kwargs: object) -> None:
        calls.append((name, kwargs["local_files_only"]))
        raise OSError("we could not connect")

    monkeypatch.setattr(DiffusionPipeline, "load_config", offline)
    with pytest.raises(ModelFolderError, match=r"hub failed .*could not connect.*spelling"):
        load_pipeline("some-one/some-model")
    assert calls == [("some-one/some-model", False)]


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


WEIGHTS = "diffusion_pytorch_model.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
#: What is wrong with a folder, how it is made so, and what is said.
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another pipeline": (
        lambda f: change(f / "model_index.json", _class_name="FluxPipeline"), "FluxPipeline"
    ),
    "no vae": (lambda f: shutil.rmtree(f / "vae"), "lacks the folder 'vae'"),
    "no tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), "lacks the folder 'tokenizer'"),
    "no weights": (lambda f: (f / "vae" / WEIGHTS).unlink(), "vae has no weights"),
    "half the weights": (
        lambda f: shorten(f / "transformer" / WEIGHTS), "damaged or incomplete"
    ),
    "a pointer": (lambda f: (f / "vae" / WEIGHTS).write_text(LFS), "git lfs pull"),
    "no JSON": (
        lambda f: (f / "transformer" / "config.json").write_text("{"),
        r"config\.json is not valid JSON",
    ),
    "nested JSON": (
        lambda f: (f / "vae" / "config.json").write_text("[" * 200_000 + "]" * 200_000),
        "not valid JSON",
    ),
    "a file with a hole of 1 TiB": (
        lambda f: os.truncate(f / "vae" / "config.json", 1 << 40), "at most"
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


@pytest.mark.parametrize("name", ["model_index.json", "vae/config.json", "turbo_rcm.json"])
def test_a_file_that_cannot_be_read_is_named(broken: Path, name: str, monkeypatch) -> None:
    (broken / "turbo_rcm.json").write_text("{}")
    read_text = Path.read_text

    def refuse(path: Path, *how: str, **more: str) -> str:
        if path == broken / name:  # As a disk with a defect does it; root may read everything.
            raise OSError(5, "Input/output error", str(path))
        return read_text(path, *how, **more)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelFolderError, match=rf"{name} cannot be read \(Input/output error"):
        settings_for(load_pipeline(broken, device="cpu"))


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


def test_a_skeleton_of_another_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(ModelFolderError, match=r"FluxTransformer2D.*WanVACETransformer3DModel"):
        load_skeleton(tmp_path)


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


def test_without_a_connection_the_first_words_say_so(monkeypatch) -> None:
    """diffusers then says that the model has no config.json."""
    import diffusers

    def offline(*_: object, **__: object) -> None:
        why = OSError("a/b does not appear to have a file named config.json.")
        raise why from LocalEntryNotFoundError("Please check your connection")

    monkeypatch.setattr(diffusers.ConfigMixin, "load_config", offline)
    for load in (load_skeleton, load_pipeline):
        with pytest.raises(ModelFolderError, match="download the folder first") as caught:
            load("somebody/some-model")
        assert str(caught.value).startswith(
            "no connection to the model hub: 'somebody/some-model'"
        )


def test_a_wheel_without_the_second_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_rcm_patch.tiny.TINY_COGVIDEOX", Path("nowhere"))
    with pytest.raises(ModelFolderError, match=r"no weights of tiny-cogvideox.*clone"):
        load_pipeline("tiny-cogvideox")
