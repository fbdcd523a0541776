"""Files that are damaged, hostile or hold more than one network: told, and never half believed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.turbodiffusion.test_convert import Evil
from tests.turbodiffusion.wan_model import Options, save, state_dict
from turbo_rcm_patch import load_extra, patch_model
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError
from turbo_rcm_patch.turbodiffusion import read_checkpoint, write_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer
from turbo_rcm_patch.video import load as loading

WEIGHTS = "diffusion_pytorch_model"


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    save(Options(), tmp_path / "in.pth")
    return tmp_path / "in.pth"


@pytest.mark.parametrize("at", [0.3, 0.5, 0.9])
def test_a_zeroed_middle_is_noticed(at: float, pth: Path, tmp_path: Path) -> None:
    with pth.open("r+b") as file:
        file.seek(int(at * pth.stat().st_size))
        file.write(bytes(4096))
    with pytest.raises(CheckpointError, match=r"damaged: the checksum of its record .*data/"):
        read_checkpoint(pth)
    assert main(["convert", str(pth), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_files_without_checksums_are_read(pth: Path) -> None:
    """What torch writes with `set_crc32_options(False)` has none to compare with."""
    state = torch.load(pth, weights_only=True)
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(state, pth)
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_checkpoint(pth).tensors.keys() == state.keys()


def test_progress_of_the_check_is_told(pth: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    read_checkpoint(pth, progress=lambda *update: seen.append(update))
    assert {stage for stage, _, _ in seen} == {"check"} and seen[-1][1] == seen[-1][2]


CHOICES: dict[str, tuple[Any, str, list[str]]] = {
    "model and its average": (lambda a, b: {"model": a, "model_ema": b}, "model", ["model_ema"]),
    "containers": (lambda a, b: {"generator": {"model": a}, "generator_ema": b},
                   "generator.model", ["generator_ema"]),
    "prefixes": (lambda a, b: prefixed("net.", a) | prefixed("net_ema.", b), "net", ["net_ema"]),
    "in a container": (lambda a, b: {"model": prefixed("net.", a) | prefixed("net_ema.", b)},
                       "model.net", ["model.net_ema"]),
}  # fmt: skip


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in state.items()}


@pytest.mark.parametrize("form", CHOICES)
def test_which_network_is_taken_is_said(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, first, others = CHOICES[form]
    states = [state_dict(Options(), seed) for seed in (1, 2)]
    torch.save(make(*states), tmp_path / "in.pth")
    found = read_checkpoint(tmp_path / "in.pth")
    assert found.network == first and list(found.others) == others
    assert f"{first!r} is taken, and not {others[0]!r}" in caplog.text
    name = "blocks.0.ffn.0.weight"
    assert torch.equal(found.tensors[name], states[0][name])
    caplog.clear()
    for network in (others[0], others[0].split(".")[-1]):
        other = read_checkpoint(tmp_path / "in.pth", network=network)
        assert torch.equal(other.tensors[name], states[1][name]) and not caplog.text
    with pytest.raises(CheckpointError, match=r"0 that fit, of"):
        read_checkpoint(tmp_path / "in.pth", network="teacher")


def test_the_command_takes_the_network(tmp_path: Path) -> None:
    states = [state_dict(Options(), seed) for seed in (1, 2)]
    torch.save(dict(zip(("model", "model_ema"), states, strict=True)), tmp_path / "in.pth")
    given = ["convert", str(tmp_path / "in.pth"), str(tmp_path / "out")]
    assert main([*given, "--network", "model_ema"]) == 0
    stored = load_file(tmp_path / "out" / f"{WEIGHTS}.safetensors")
    assert torch.equal(stored["proj_out.weight"], states[1]["head.head.weight"])
    assert main([*given, "--back", "--network", "net"]) == 2


@pytest.mark.parametrize("names", [("state_dict", "model"), ("generator", "critic")])
def test_two_that_could_be_meant_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    states = [state_dict(Options(), seed) for seed in (1, 2)]
    torch.save(dict(zip(names, states, strict=True)), tmp_path / "in.pth")
    with pytest.raises(CheckpointError, match=r"2 networks.*--network NAME"):
        read_checkpoint(tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth", network=names[1]).network == names[1]


@pytest.mark.parametrize(
    "prefix", ["net_ema.", "generator.", "model.diffusion_model.", "ema.net."]
)
def test_prefixes_of_other_programs(prefix: str, tmp_path: Path) -> None:
    state = state_dict(Options())
    torch.save(prefixed(prefix, state), tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth").tensors.keys() == state.keys()
    torch.save({"state_dict": prefixed(prefix, state), "step": 1}, tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth").tensors.keys() == state.keys()


def test_strangers_beside_a_network_are_refused(tmp_path: Path) -> None:
    state = prefixed("net.", state_dict(Options())) | {"logvar.weight": torch.ones(2)}
    torch.save(state, tmp_path / "in.pth")
    with pytest.raises(CheckpointKeysError) as caught:
        read_checkpoint(tmp_path / "in.pth")
    assert caught.value.unexpected == ("logvar.weight [2]",)


def test_a_refusal_does_not_pass_on_unsafe_advice(tmp_path: Path) -> None:
    for name, zipped in (("new.pth", True), ("old.pth", False)):
        path = tmp_path / name
        torch.save({"evil": Evil()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(CheckpointError, match="nothing in it was executed") as caught:
            read_checkpoint(path)
        assert "weights_only" not in str(caught.value) and "trust" not in str(caught.value)
        assert "one that asks for " in str(caught.value)  # What it would have run.
    with zipfile.ZipFile(tmp_path / "script.pth", "w") as archive:  # As TorchScript's.
        for name in ("constants.pkl", "data.pkl", "version"):
            archive.writestr(f"archive/{name}", "3")
    with pytest.raises(CheckpointError, match="TorchScript") as caught:
        read_checkpoint(tmp_path / "script.pth")
    assert "weights_only" not in str(caught.value)
    refusal = pickle.UnpicklingError("Weights only load failed. Set `weights_only` to `False`, …")
    assert "weights_only" not in loading.first_line(refusal)


BOMB = """
import resource, sys
from turbo_rcm_patch.turbodiffusion import read_checkpoint
from turbo_rcm_patch.errors import CheckpointError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_checkpoint(sys.argv[1])
except CheckpointError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("record", ["archive/data.pkl", "archive/data/0"])
def test_a_zip_bomb_is_refused_unread(record: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open(record, "w", force_zip64=True) as file:
            for _ in range(32):
                file.write(b"]" * 2**22)
        archive.writestr("archive/version", "3")
    assert path.stat().st_size < 2**20
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True
    )
    text, grown = done.stdout.strip().splitlines()
    assert "would unpack to more bytes than the file has" in text
    assert int(grown) < 64 * 2**10, f"{grown} KiB"


def test_a_huge_pickle_is_refused_unread(tmp_path: Path) -> None:
    """Stored as it is: objects take many times the memory of their pickle."""
    with zipfile.ZipFile(tmp_path / "in.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"]" * (2**26 + 1))
    with pytest.raises(CheckpointError, match="objects to unpickle"):
        read_checkpoint(tmp_path / "in.pth")


def test_compressed_weights_are_refused(pth: Path, tmp_path: Path) -> None:
    """torch would map the compressed bytes as the weights."""
    with zipfile.ZipFile(pth) as old, zipfile.ZipFile(tmp_path / "z.pth", "w") as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="weights in it are compressed"):
        read_checkpoint(tmp_path / "z.pth")


def test_a_record_twice_is_refused(pth: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(pth, "a") as archive:
        archive.writestr("in/data/0", b"0" * 16)
    with pytest.raises(CheckpointError, match="two records with the same name"):
        read_checkpoint(pth)


@pytest.fixture
def sharded(pth: Path, tmp_path: Path) -> Path:
    convert_transformer(pth, tmp_path / "folder", shard_bytes=2**20)
    return tmp_path / "folder"


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "a\\..\\b", 3, ".."])
def test_an_index_does_not_lead_out_of_its_folder(
    name: Any, sharded: Path, tmp_path: Path
) -> None:
    index = sharded / f"{WEIGHTS}.safetensors.index.json"
    listing = json.loads(index.read_text())
    listing["weight_map"]["proj_out.weight"] = name
    index.write_text(json.dumps(listing))
    save_file({"proj_out.weight": torch.ones(16, 256)}, tmp_path.parent / "secret.safetensors")
    with pytest.raises(CheckpointError, match="in the same folder"):
        write_checkpoint(sharded, tmp_path / "back.pth")
    assert not (tmp_path / "back.pth").exists()


def test_links_into_a_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    """As the hub's cache has its files."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(sharded.glob("*.safetensors")):
        path.rename(blobs / path.name)
        path.symlink_to(Path(os.path.relpath(blobs, sharded)) / path.name)
    write_checkpoint(sharded, tmp_path / "back.pth")


def test_a_base_does_not_lead_out_of_its_folder(pth: Path, tmp_path: Path) -> None:
    from tests.turbodiffusion.test_convert_command import TINY, base_folder

    save(TINY, pth)
    base = base_folder(tmp_path / "base")
    (tmp_path / "secret").mkdir()
    index = json.loads((base / "model_index.json").read_text())
    index["../secret"] = ["diffusers", "AutoencoderKLWan"]
    (base / "model_index.json").write_text(json.dumps(index))
    assert main(["convert", str(pth), str(tmp_path / "out"), "--base", str(base)]) == 2
    assert not (tmp_path / "out").exists() and not (tmp_path / "secret").is_symlink()


def test_folders_that_are_not_whole(sharded: Path, tmp_path: Path) -> None:
    shards = sorted(sharded.glob("*-of-*"))
    whole = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing"):
        write_checkpoint(sharded, tmp_path / "back.pth")
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing, damaged"):
        write_checkpoint(sharded, tmp_path / "back.pth")
    shards[1].write_bytes(whole)
    tensors = load_file(shards[1])
    first = next(iter(load_file(shards[0])))
    save_file(tensors | {first: torch.ones(2)}, shards[1])
    with pytest.raises(CheckpointError, match="occurs twice"):
        write_checkpoint(sharded, tmp_path / "back.pth")
    name = next(name for name in tensors if name.endswith("weight"))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, shards[1])
    with pytest.raises(CheckpointKeysError, match="expected float"):
        write_checkpoint(sharded, tmp_path / "back.pth")
    (sharded / f"{WEIGHTS}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match='a "weight_map"'):
        write_checkpoint(sharded, tmp_path / "back.pth")
    (sharded / f"{WEIGHTS}.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        write_checkpoint(sharded, tmp_path / "back.pth")
    assert not list(tmp_path.glob("*back*"))


def test_a_truncated_extra_file_is_named(pth: Path, tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    save(Options(sla=True), pth)
    convert_transformer(pth, tmp_path / "out")
    extra = tmp_path / "out" / "turbo_extra.safetensors"
    extra.write_bytes(extra.read_bytes()[:-100])
    model = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="turbo_extra.safetensors is missing, damaged"):
        load_extra(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"turbo_extra.safetensors is missing, damaged"):
        patch_model(model)
