"""Files that would change the process that reads them, hang it or fill its memory, and files of
other kinds: refused with a typed error, soon."""

from __future__ import annotations

import inspect
import pathlib
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.turbodiffusion.test_distributed import edit, write
from tests.turbodiffusion.wan_model import Options, save, state_dict
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError
from turbo_rcm_patch.turbodiffusion import read_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer
from turbo_rcm_patch.turbodiffusion.original import read_text_encoder, read_vae

TINY = Options(layers=1)
KEY = "blocks.0.ffn.0.weight"


def slot_state(of: str, attribute: str, value: str) -> bytes:
    """A pickle that sets an attribute of what it names, by the state of slots of BUILD."""
    name = attribute.encode()
    key = b"X" + len(name).to_bytes(4, "little") + name
    return b"\x80\x02c" + of.encode() + b"N}" + key + b"c" + value.encode() + b"s\x86b."


@pytest.mark.parametrize(
    ("of", "attribute"),
    [
        ("pathlib\nPosixPath\n", "unlink"),
        ("pathlib\nPath\n", "exists"),
        ("torch.distributed.checkpoint.metadata\nMetadata\n", "storage_data"),
        ("torch.distributed.checkpoint.filesystem\n_StorageInfo\n", "offset"),
        ("torch.serialization\n_get_layout\n", "__defaults__"),
        ("torch\nSize\n", "numel"),
        ("collections\nOrderedDict\n", "get"),
    ],
    ids=lambda value: value.split("\n")[-2] if "\n" in value else value,
)
def test_metadata_cannot_change_a_class(of: str, attribute: str, tmp_path: Path) -> None:
    module, name = of.split()
    owner = getattr(inspect.importlib.import_module(module), name)  # type: ignore[attr-defined]
    before = dict(vars(owner))
    own = {cls: dict(vars(cls)) for cls in (pathlib.Path, pathlib.PosixPath, OrderedDict)}
    try:
        for value in (of, "torch\nSize\n"):
            (tmp_path / ".metadata").write_bytes(slot_state(of, attribute, value))
            with pytest.raises(CheckpointError):
                read_checkpoint(tmp_path)
        assert dict(vars(owner)) == before
        assert all(dict(vars(cls)) == attributes for cls, attributes in own.items())
    finally:  # Not for the other tests, if it fails.
        for cls, attributes in [(owner, before), *own.items()]:
            for key in {*vars(cls)} - {"__dict__", "__weakref__"}:
                if key not in attributes:
                    delattr(cls, key)
                elif vars(cls)[key] is not attributes[key]:
                    setattr(cls, key, attributes[key])


def test_a_number_in_metadata_does_not_take_memory(tmp_path: Path) -> None:
    """C's unpickler makes a table as long as the largest number of a memo."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x0f.")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)


def sized(*size: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[KEY]
        entry.size = entry.chunks[0].sizes = torch.Size(size)

    return change


def stretched(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 2**40


def odd_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata[KEY].properties.dtype = "float32"


@pytest.mark.parametrize(
    "change",
    [sized(10**15, 1), sized(2**31, 2**31), sized(-1, 0), stretched, odd_dtype],
    ids=["large", "larger", "negative", "stretched", "dtype"],
)
def test_declared_sizes_are_compared_with_the_files(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    folder = write(state_dict(TINY), tmp_path / "out")
    edit(folder, change)
    with pytest.raises(CheckpointError):
        read_checkpoint(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overlapping", [False, True])
def test_many_shards_are_compared_soon(overlapping: bool, tmp_path: Path) -> None:
    folder = write(state_dict(TINY) | {"rows": torch.zeros(10000, 2)}, tmp_path / "out")

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["rows"]
        index = dcp.metadata.MetadataIndex
        info = metadata.storage_data.pop(index("rows", entry.chunks[0].offsets))
        offsets = [torch.Size([row, 0]) for row in range(10000)]
        if overlapping:  # A hole, and two of the same.
            offsets[-1] = torch.Size([9998, 0])
        one = torch.Size([1, 2])
        entry.chunks = [dcp.metadata.ChunkStorageMetadata(at, one) for at in offsets]
        metadata.storage_data.update({index("rows", at): info for at in offsets})

    edit(folder, change)
    with pytest.raises(
        CheckpointError, match="rows is not whole" if overlapping else "incomplete"
    ):
        read_checkpoint(folder)


def test_a_damaged_shard_is_always_a_typed_error(tmp_path: Path) -> None:
    folder = write(state_dict(TINY), tmp_path / "out")
    shard = next(folder.glob("*.distcp"))
    whole, draw = shard.read_bytes(), random.Random(0)
    for _ in range(40):
        junk = bytearray(whole)
        at = draw.randrange(len(whole) - 4096)
        junk[at : at + 4096] = draw.randbytes(4096)
        shard.write_bytes(junk)
        with pytest.raises(CheckpointError):
            read_checkpoint(folder)
    # Without checksums and directory, as torch's old format.
    for _ in range(100):
        shard.write_bytes(b"\x80\x02" + draw.randbytes(len(whole) - 2))
        with pytest.raises(CheckpointError):
            read_checkpoint(folder)


@pytest.mark.timeout(60)
def test_a_high_number_of_a_block_is_one_name(tmp_path: Path) -> None:
    for number in ("200000", "999999999", "9" * 5000, "²"):
        key = f"blocks.{number}.x.weight"
        torch.save(state_dict(TINY) | {key: torch.ones(1)}, tmp_path / "in.pth")
        with pytest.raises(CheckpointKeysError) as caught:
            read_checkpoint(tmp_path / "in.pth")
        assert caught.value.unexpected == (f"{key} [1]",)
        assert len(caught.value.missing) < 40


@pytest.mark.timeout(60)
@pytest.mark.parametrize("keys", [1, 60, 5000])
def test_a_dictionary_that_holds_itself_ends(keys: int, tmp_path: Path) -> None:
    state = state_dict(TINY)
    ring: dict[str, Any] = {}
    ring.update({f"k{i}": ring for i in range(keys)})
    torch.save({"model": state, "ring": ring}, tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth").tensors.keys() == state.keys()
    torch.save(ring, tmp_path / "in.pth")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "in.pth")


def test_one_dictionary_under_two_names_is_two_networks(tmp_path: Path) -> None:
    state = state_dict(TINY)
    torch.save({"model": state, "model_ema": state}, tmp_path / "in.pth")
    for name in ("model", "model_ema"):
        assert read_checkpoint(tmp_path / "in.pth", network=name).network == name


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1, 1).expand(320, 256),
        lambda: torch.ones(320, 256, device="meta"),
        lambda: torch.eye(320, 256).to_sparse(),
        lambda: torch.eye(320, 256).to_sparse_csr(),
        nested,
    ],
    ids=["expanded", "meta", "sparse", "csr", "nested"],
)
def test_tensors_without_their_bytes_are_refused(
    make: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    torch.save(state_dict(TINY) | {KEY: make()}, tmp_path / "in.pth")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "in.pth")


class Call:
    """Pickled as a call of something that torch lets state dicts call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "content",
    [
        b"XX",
        b"\x80\x02",
        Call(torch._utils._rebuild_tensor_v2),
        Call(OrderedDict, 5),
        Call(torch._utils._rebuild_parameter, 1, 2, 3),
    ],
    ids=["two bytes", "half", "no arguments", "number", "parameter"],
)
def test_what_torch_stumbles_over_is_a_typed_error(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save({"x": content}, path)
    with pytest.raises(CheckpointError, match="is not a torch checkpoint"):
        read_checkpoint(path)


def test_projections_in_one_storage_are_written(tmp_path: Path) -> None:
    options = Options(sla=True)
    state = state_dict(options)
    name = "self_attn.attn_op.local_attn.proj_l.weight"
    state[f"blocks.1.{name}"] = state[f"blocks.0.{name}"]
    torch.save(state, tmp_path / "in.pth")
    assert convert_transformer(tmp_path / "in.pth", tmp_path / "out").sla == 2


@pytest.mark.timeout(60)
def test_strange_names_in_a_vae_or_a_text_encoder(tmp_path: Path) -> None:
    one, path = torch.ones(1, 1), tmp_path / "in.pth"
    for strange in ("x.y", "9" * 5000 + ".bias", "1000000.resample.1.weight"):
        state = {"decoder.conv1.weight": one, "encoder.conv1.weight": one, "conv2.weight": one,
                 f"encoder.downsamples.{strange}": one}  # fmt: skip
        if "resample" in strange:
            state["encoder.downsamples.1000000.residual.2.weight"] = one
        torch.save(state, path)
        with pytest.raises(CheckpointError, match=r"the VAE of Wan 2\.1"):
            read_vae(path)
    block = "blocks.999999999"
    torch.save({"token_embedding.weight": one, "blocks.0.pos_embedding.embedding.weight": one,
                "blocks.0.ffn.fc1.weight": one, "blocks.0.attn.q.weight": one,
                f"{block}.norm1.weight": one}, path)  # fmt: skip
    assert read_text_encoder(path).config["num_layers"] == 2
    torch.save({"token_embedding.weight": torch.ones(1), "norm.weight": one,
                "blocks.0.pos_embedding.embedding.weight": one}, path)  # fmt: skip
    with pytest.raises(CheckpointError, match="the encoder of umT5"):
        read_text_encoder(path)


def test_metadata_of_any_pickle_is_a_typed_error(tmp_path: Path) -> None:
    write(state_dict(TINY), tmp_path / "out")
    path = tmp_path / "out" / ".metadata"
    whole, draw = path.read_bytes(), random.Random(1)
    for _ in range(100):
        junk = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            junk[draw.randrange(len(junk))] = draw.randrange(256)
        path.write_bytes(junk)
        try:
            read_checkpoint(tmp_path / "out")
        except CheckpointError:
            continue
    path.write_bytes(pickle.dumps({"state_dict_metadata": 1}))
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "out")


def test_the_tiny_model_itself_is_read(tmp_path: Path) -> None:
    save(TINY, tmp_path / "in.pth")
    assert read_checkpoint(tmp_path / "in.pth").sizes.layers == 1
