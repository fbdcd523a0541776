"""Folders of torch.distributed.checkpoint: read whole or refused, and nothing in them executed."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.turbodiffusion.test_convert import Evil
from tests.turbodiffusion.test_damage import prefixed
from tests.turbodiffusion.wan_model import Options, save, state_dict
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.turbodiffusion import read_checkpoint
from turbo_rcm_patch.turbodiffusion.read import open_width
from turbowan.models import transformer_folder

OPTIONS = Options(sla=True, dtype=torch.bfloat16)


def write(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As training leaves it: a step with a folder for the model."""
    state = prefixed("net.", state_dict(OPTIONS, 1)) | prefixed("net_ema.", state_dict(OPTIONS, 2))
    write(state, tmp_path / "iter_1" / "model")
    return tmp_path / "iter_1"


@pytest.mark.parametrize("network", [None, "net", "net_ema"])
def test_it_is_read_as_a_file_is(folder: Path, network: str | None) -> None:
    expected = state_dict(OPTIONS, 2 if network == "net_ema" else 1)
    for place in (folder, folder / "model"):
        found = read_checkpoint(place, network=network)
        assert found.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor), name


def test_the_command_and_the_scripts_take_it(folder: Path, tmp_path: Path) -> None:
    given = ["convert", str(folder), str(tmp_path / "out"), "--network", "net_ema"]
    assert main(given) == 0
    torch.save(state_dict(OPTIONS, 2), tmp_path / "in.pth")
    assert main(["convert", str(tmp_path / "in.pth"), str(tmp_path / "same")]) == 0
    for path in (tmp_path / "same").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    made = transformer_folder(folder)
    assert made == tmp_path / "iter_1-diffusers" and (made / "config.json").is_file()
    before = (made / "config.json").stat().st_mtime_ns
    assert transformer_folder(folder) == made
    assert (made / "config.json").stat().st_mtime_ns == before
    assert open_width(folder) == 0  # SLA shows the heads.


def test_other_entries_are_no_obstacle(tmp_path: Path) -> None:
    state = {"model": state_dict(OPTIONS), "step": 3, "optimizer": {"lr": torch.ones(2)}}
    assert read_checkpoint(write(state, tmp_path / "out")).network == "model"


def test_shards_are_put_together(tmp_path: Path) -> None:
    """As several ranks write them: here the metadata of one whole is cut in two."""
    state = state_dict(OPTIONS)
    key = "blocks.0.ffn.0.weight"
    rows = state[key].shape[0] // 2
    parts = {"upper": state[key][:rows].clone(), "lower": state[key][rows:].clone()}
    folder = write({**{k: v for k, v in state.items() if k != key}, **parts}, tmp_path / "out")
    edit(folder, lambda metadata: join(metadata, key, state[key], rows))
    assert torch.equal(read_checkpoint(folder).tensors[key], state[key])
    edit(folder, lambda metadata: metadata.state_dict_metadata[key].chunks.pop())
    with pytest.raises(CheckpointError, match=f"{key} is not whole"):
        read_checkpoint(folder)


def join(metadata: Any, key: str, whole: torch.Tensor, rows: int) -> None:
    kind, index = dcp.metadata.TensorStorageMetadata, dcp.metadata.MetadataIndex
    chunks = []
    for part, start in (("upper", 0), ("lower", rows)):
        entry = metadata.state_dict_metadata.pop(part)
        chunk = dcp.metadata.ChunkStorageMetadata(torch.Size([start, 0]), entry.chunks[0].sizes)
        chunks.append(chunk)
        info = metadata.storage_data.pop(index(part, entry.chunks[0].offsets))
        metadata.storage_data[index(key, chunk.offsets)] = info
    metadata.state_dict_metadata[key] = kind(entry.properties, whole.shape, chunks)


def edit(folder: Path, change: Any) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_nothing_in_it_is_executed(folder: Path) -> None:
    model, marker = folder / "model", Path("/tmp/turbo_rcm_patch_was_here")
    whole = (model / ".metadata").read_bytes()
    (model / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="nothing in it was executed"):
        read_checkpoint(folder)
    (model / ".metadata").write_bytes(whole)
    shard = next(model.glob("*.distcp"))
    size = shard.stat().st_size
    torch.save(Evil(), shard)
    shard.write_bytes(shard.read_bytes().ljust(size, b"\0"))
    with pytest.raises(CheckpointError):
        read_checkpoint(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".."])
def test_it_does_not_lead_out_of_its_folder(name: str, folder: Path) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    edit(folder / "model", change)
    with pytest.raises(CheckpointError, match="a file in the same folder"):
        read_checkpoint(folder)


def test_damage_is_noticed(folder: Path) -> None:
    model = folder / "model"
    shard = next(model.glob("*.distcp"))
    whole = shard.read_bytes()
    middle = len(whole) // 4
    shard.write_bytes(whole[:middle] + bytes(4096) + whole[middle + 4096 :])
    with pytest.raises(CheckpointError):
        read_checkpoint(folder)
    shard.write_bytes(whole[:middle])
    with pytest.raises(CheckpointError):
        read_checkpoint(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match="the files of all ranks"):
        read_checkpoint(folder)
    (model / ".metadata").write_bytes((model / ".metadata").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="metadata of a distributed checkpoint"):
        read_checkpoint(folder)


def test_a_folder_of_diffusers_is_told_from_it(tmp_path: Path) -> None:
    save(OPTIONS, tmp_path / "in.pth")
    assert main(["convert", str(tmp_path / "in.pth"), str(tmp_path / "out")]) == 0
    with pytest.raises(CheckpointError, match=r"is a folder.*--back"):
        read_checkpoint(tmp_path / "out")
