"""Checkpoints that are damaged, hostile or hold more than one network: refused with a typed error,
and never half believed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import zipfile
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import processes
from tests.checkpoints.wan_model import Options, save, state_dict
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.checkpoints import folder as folder_module
from turbo_rcm_patch.checkpoints import load_int8_only, read_checkpoint
from turbo_rcm_patch.checkpoints.convert import convert_transformer
from turbo_rcm_patch.checkpoints.extra_file import stored_tensors
from turbo_rcm_patch.errors import CheckpointError, CheckpointKeysError

WEIGHTS = "diffusion_pytorch_model"
TINY = Options(layers=1)
KEY = "blocks.0.ffn.0.weight"


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    """A smaller one than elsewhere."""
    save(TINY, tmp_path / "in.pth")
    return tmp_path / "in.pth"


# Damage.


def test_any_damage_is_a_typed_error(pth: Path, tmp_path: Path) -> None:
    whole, draw = pth.read_bytes(), random.Random(0)
    junk = [(int(at * len(whole)), bytes(4096)) for at in (0.3, 0.9)]
    junk += [(draw.randrange(len(whole) - 4096), draw.randbytes(4096)) for _ in range(25)]
    for at, content in junk:
        pth.write_bytes(whole[:at] + content + whole[at + 4096 :])
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(pth)
        assert any(content) or "CRC-32 for file" in str(caught.value)
    assert main(["convert", str(pth), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    for _ in range(25):  # Without checksums and directory, as torch's old format.
        pth.write_bytes(b"\x80\x02" + draw.randbytes(2**16))
        with pytest.raises(CheckpointError):
            read_checkpoint(pth)


def test_files_without_checksums_are_read(pth: Path) -> None:
    state = torch.load(pth, weights_only=True)
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(state, pth)
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_checkpoint(pth).tensors.keys() == state.keys()


# Hostile files.


class Call:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_is_executed(zipped: bool, tmp_path: Path) -> None:
    path, mark = tmp_path / "in.pth", tmp_path / "was here"
    evil = state_dict(TINY) | {"evil": Call(Path.touch, mark)}
    torch.save(evil, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="nothing in it was executed") as caught:
        read_checkpoint(path)
    assert not mark.exists() and "one that asks for " in str(caught.value)
    assert "weights_only" not in str(caught.value) and "trust" not in str(caught.value)


def archive(path: Path, records: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in records.items():
            file.writestr(f"archive/{name}", content)


def compressed(path: Path) -> None:
    """torch would map compressed bytes as the weights."""
    torch.save(state_dict(TINY), path)
    with zipfile.ZipFile(path) as old:
        records = {item.filename: old.read(item) for item in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in records.items():
            new.writestr(name, content, zipfile.ZIP_DEFLATED)


def doubled(path: Path) -> None:
    torch.save(state_dict(TINY), path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as twice:
        twice.writestr("in/data/0", b"0" * 16)


def ring(keys: int) -> dict[str, Any]:
    """A dictionary that holds itself."""
    made: dict[str, Any] = {}
    made.update({f"k{i}": made for i in range(keys)})
    return made


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ONE = torch.ones(1)
#: What lies at the path (bytes, what torch saves, a function that makes it, None for nothing), and
#: what the error says.
REFUSED: dict[str, tuple[Any, str]] = {
    "missing": (None, "no such file"),
    "folder": (Path.mkdir, "is a folder.*dcp_to_torch DIR FILE"),
    "empty": (b"", "not a torch checkpoint"),
    "page": (b"<html>a page</html>", "not a torch checkpoint"),
    "half": (b"PK\x03\x04 half a file", "not a torch checkpoint"),
    "two bytes": (b"\x80\x02", "not a torch checkpoint"),
    "list": ([1, 2], "a dictionary of tensors"),
    "lora": ({"a.lora_A.weight": torch.ones(2, 2)}, "the weights of TurboDiffusion's WanModel"),
    "twice": ({"x": ONE, "module.x": ONE}, "the same name, x, once"),
    "text": ({"x": "text"}, "the weights of TurboDiffusion's WanModel"),
    "no arguments": ({"x": Call(torch._utils._rebuild_tensor_v2)}, "not a torch checkpoint"),
    "number": ({"x": Call(OrderedDict, 5)}, "not a torch checkpoint"),
    "networks": ({f"n{i}.patch_embedding.weight": ONE for i in range(20000)}, "networks"),
    # Objects take many times the memory of their pickle.
    "huge pickle": (lambda p: archive(p, {"data.pkl": b"]" * (2**26 + 1)}), "objects to unpickle"),
    "script": (
        lambda p: archive(p, dict.fromkeys(("constants.pkl", "data.pkl", "version"), b"3")),
        "TorchScript",
    ),
    "compressed": (compressed, "compressed weights"),
    "record twice": (doubled, "two records with the same name"),
    "ring": (ring(5000), "the weights of TurboDiffusion's WanModel"),
    # Tensors without their bytes.
    "expanded": (lambda p: tiny(p, torch.ones(1, 1).expand(320, 256)), "a plain, dense tensor"),
    "meta": (lambda p: tiny(p, torch.ones(320, 256, device="meta")), "a plain, dense tensor"),
    "sparse": (lambda p: tiny(p, torch.eye(320, 256).to_sparse()), "in.pth"),
    "nested": (lambda p: tiny(p, nested()), "in.pth"),
}


def tiny(path: Path, weight: torch.Tensor) -> None:
    torch.save(state_dict(TINY) | {KEY: weight}, path)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|sparse)")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    path, (content, text) = tmp_path / "in.pth", REFUSED[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif callable(content):
        content(path)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=text):
        read_checkpoint(path)


BOMB = """
import resource, sys
from turbo_rcm_patch.checkpoints import read_checkpoint
from turbo_rcm_patch.errors import CheckpointError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_zip_bomb_is_refused_unread(tmp_path: Path) -> None:
    paths = []
    for name, record in (("pickle", "archive/data.pkl"), ("weights", "archive/data/0")):
        paths.append(tmp_path / f"{name}.pth")
        with zipfile.ZipFile(paths[-1], "w", zipfile.ZIP_DEFLATED) as archive:
            with archive.open(record, "w", force_zip64=True) as file:
                for _ in range(32):
                    file.write(b"]" * 2**22)
            archive.writestr("archive/version", "3")
        assert paths[-1].stat().st_size < 2**20
    *texts, grown = processes.run(BOMB, *map(str, paths)).out.strip().splitlines()
    assert ["would unpack to more bytes than the file has" in text for text in texts] == [True] * 2
    assert int(grown) < 64 * 2**10, f"{grown} KiB"


@pytest.mark.timeout(60)
def test_a_high_number_of_a_block_is_one_name(tmp_path: Path) -> None:
    for number in ("999999999", "9" * 5000, "²"):
        key = f"blocks.{number}.x.weight"
        torch.save(state_dict(TINY) | {key: torch.ones(1)}, tmp_path / "in.pth")
        with pytest.raises(CheckpointKeysError) as caught:
            read_checkpoint(tmp_path / "in.pth")
        assert caught.value.unexpected == (f"{key} [1]",)
        assert len(caught.value.missing) < 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_is_no_damage(pth: Path, tmp_path: Path) -> None:
    """Ctrl-C at any moment of reading stays KeyboardInterrupt, inside of libraries too."""
    save_file({f"{i}": torch.ones(2) for i in range(200)}, tmp_path / "in.safetensors")
    draw, interrupted = random.Random(0), 0
    reading = [partial(read_checkpoint, pth), partial(stored_tensors, tmp_path / "in.safetensors")]
    for read in reading * 20:
        timer = threading.Timer(draw.uniform(1e-3, 0.02), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            end = time.monotonic() + 1
            while time.monotonic() < end:
                read()
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
    # Python drops an interrupt that comes while it deletes an object.
    assert interrupted > 30


# Several networks in a file.


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in state.items()}


#: Form -> what is saved of two state dicts, and the names of both.
FORMS: dict[str, tuple[Any, str, str]] = {
    "model and its average": (lambda a, b: {"model": a, "model_ema": b}, "model", "model_ema"),
    "containers": (lambda a, b: {"generator": {"model": a}, "generator_ema": b},
                   "generator.model", "generator_ema"),
    "prefixes": (lambda a, b: prefixed("net.", a) | prefixed("net_ema.", b), "net", "net_ema"),
    "in a container": (lambda a, b: {"model": prefixed("net.", a) | prefixed("net_ema.", b)},
                       "model.net", "model.net_ema"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_of_several_networks_one_has_to_be_chosen(form: str, tmp_path: Path) -> None:
    (make, *names), path = FORMS[form], tmp_path / "in.pth"
    states = [state_dict(TINY, seed) for seed in (1, 2)]
    torch.save(make(*states), path)
    for asked, text in ((None, r"2 networks.*--network NAME"), ("teacher", r"0 that fit, of")):
        with pytest.raises(CheckpointError, match=text) as caught:
            read_checkpoint(path, network=asked)
        assert all(repr(name) in str(caught.value) for name in names)
    for name, state in zip(names, states, strict=True):
        for asked in {name, name.split(".")[-1]}:
            read = read_checkpoint(path, network=asked)
            assert torch.equal(read.tensors[KEY], state[KEY]), asked
    assert main(["convert", str(path), str(tmp_path / "out"), "--network", names[1]]) == 0
    stored = load_file(tmp_path / "out" / f"{WEIGHTS}.safetensors")
    assert torch.equal(stored["proj_out.weight"], states[1]["head.head.weight"])


def test_weights_beside_a_network_are_left_out_only_if_it_is_named(tmp_path, caplog) -> None:
    state, weight, path = state_dict(TINY), torch.ones(4, 256), tmp_path / "in.pth"
    harmless = {
        "optimizer": {"state": {0: {"exp_avg": weight}}},
        "optim_states": {"exp_avg": state},
        "rng": {"torch": torch.get_rng_state()},
        "step": torch.tensor(3.0),
        "log": {"module": 1, "_orig_mod": 2},
        "ring": ring(1),
    }
    torch.save({"model": state} | harmless, path)
    assert torch.equal(read_checkpoint(path).tensors[KEY], state[KEY]) and not caplog.text
    lost = {"lora": {"q": {"lora_A": weight, "lora_B": weight}}, "extra_head": weight}
    for beside in (lost, {"adam": {name: {"exp_avg": x} for name, x in state.items()}}):
        torch.save({"model": state} | harmless | beside, path)
        with pytest.raises(CheckpointError, match=r"weights beside the network.*--network model"):
            read_checkpoint(path)
        chosen = read_checkpoint(path, network="model")
        assert torch.equal(chosen.tensors[KEY], state[KEY])
        assert "are left out: " in caplog.text
        caplog.clear()
    with pytest.raises(CheckpointKeysError, match=r"1 unexpected.*lora_A"):
        torch.save(state | {"blocks.0.self_attn.q.lora_A.weight": weight}, path)
        read_checkpoint(path)


# Folders.


@pytest.fixture
def sharded(pth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save(replace(TINY, quant=True), pth)
    monkeypatch.setattr(folder_module, "SHARD_BYTES", 2**20)
    convert_transformer(pth, tmp_path / "folder", int8_only=True)
    return tmp_path / "folder"


def test_links_into_a_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    """As the hub's cache has its files."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(sharded.glob("*.safetensors")):
        path.rename(blobs / path.name)
        path.symlink_to(Path(os.path.relpath(blobs, sharded)) / path.name)
    load_int8_only(sharded)


def test_folders_that_are_not_whole(sharded: Path) -> None:
    index = sharded / f"{WEIGHTS}.safetensors.index.json"
    shards = sorted(sharded.glob("*-of-*"))
    whole, tensors = shards[1].read_bytes(), load_file(shards[1])
    first = next(iter(load_file(shards[0])))
    name = next(name for name in tensors if name.endswith("weight"))
    int8 = {name: tensors[name].to(torch.int8)}
    listing = json.loads(index.read_text())

    def leads(to: Any) -> None:
        places = listing["weight_map"] | {"proj_out.weight": to}
        index.write_text(json.dumps(listing | {"weight_map": places}))

    outside = ("../../secret.safetensors", "/etc/passwd", "a\\..\\b", 3, "..")
    for damage, text in (
        *((partial(leads, to), "in the same folder") for to in outside),
        (lambda: index.write_text(json.dumps(listing)), ""),
        (shards[1].unlink, f"{shards[1].name} is missing"),
        (lambda: shards[1].write_bytes(whole[: len(whole) // 2]), f"{shards[1].name} is missing"),
        (lambda: save_file(tensors | {first: torch.ones(2)}, shards[1]), "occurs twice"),
        (lambda: save_file(tensors | int8, shards[1]), "expected float"),
        (lambda: index.write_text("{}"), "weight_map"),
        (index.unlink, "is missing"),
    ):
        damage()
        if text:
            with pytest.raises(CheckpointError, match=text):
                load_int8_only(sharded)
        else:
            load_int8_only(sharded)
