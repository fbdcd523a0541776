"""The command `convert`: the folders it writes, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file

from tests.checkpoints.wan_model import Options, save
from tests.files import everything
from tests.video import micro
from turbo_rcm_patch import RCMScheduler
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.checkpoints import EXTRA_FILE
from turbo_rcm_patch.checkpoints.convert import _KEPT, convert_pipeline
from turbo_rcm_patch.errors import OutputExistsError, TurboRCMError
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.tiny import TINY_COGVIDEOX
from turbo_rcm_patch.video import Settings, generation, load, load_pipeline

PROMPT = "a red circle"
CONFIG: dict[str, Any] = dict(
    num_attention_heads=2, attention_head_dim=128, text_dim=32, freq_dim=32, ffn_dim=320,
    num_layers=2, rope_max_seq_len=64,
)  # fmt: skip


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def base_folder(folder: Path, *, experts: bool = False) -> Path:
    """A pipeline of the sizes of `SLA`, as a hub would have it."""
    pipe = micro.micro_image_pipe(experts=True) if experts else micro.micro_pipe()
    inputs = 12 if experts else 4
    for name in ("transformer", "transformer_2")[: 1 + experts]:
        network = WanTransformer3DModel(**CONFIG, in_channels=inputs, out_channels=4)
        pipe.register_modules(**{name: network})
    return micro.save(pipe, folder)


def test_a_whole_a14b_through_the_commands(tmp_path, monkeypatch, capsys) -> None:
    """As on a card of 24 GiB: two -quant experts converted to int8 alone, then a video from an
    image with every component offloaded, SLA and the rCM sampler. A CPU stands for the card."""
    base = base_folder(tmp_path / "base", experts=True)
    high, low = (tmp_path / f"{name}.pth" for name in ("high", "low"))
    options = Options(text=32, inputs=12, sla=True, quant=True, dtype=torch.bfloat16)
    states = [save(options, path, seed=seed) for seed, path in ((1, high), (2, low))]
    out = tmp_path / "out"
    command = ["convert", str(high), str(out), "--low-noise", str(low), "--base", str(base)]
    assert main([*command, "--int8-only", "--copy"]) == 0
    assert not any(path.is_symlink() for path in out.iterdir())
    picture, video = tmp_path / "first.png", tmp_path / "video.mp4"
    Image.new("RGB", (40, 40), "teal").save(picture)
    move = load.move
    monkeypatch.setattr(load, "move", lambda pipe, device, _: move(pipe, device, "group"))
    latents, real = list[torch.Tensor](), generation.generate

    def generate(pipe: Any, *given: Any, **named: Any) -> Any:
        for part, state in zip((pipe.transformer, pipe.transformer_2), states, strict=True):
            assert torch.equal(part.proj_out.weight, state["head.head.weight"])
            assert attached_proj_l(part.blocks[0].attn1) is not None
            kinds = {type(module) for module in part.blocks.modules()}
            assert Int8Linear in kinds and torch.nn.Linear not in kinds
        assert pipe.scheduler.config.sigma_max == 200 and pipe.config.boundary_ratio == 0.9
        assert all(micro.hooked(pipe).values())
        made = real(pipe, *given, **named)
        latents.append(made.latents)
        return made

    monkeypatch.setattr(generation, "generate", generate)
    asked = micro.options(model=out, linear="int8-only", image=picture, prompt=PROMPT, steps=4)
    asked = ["generate", *micro.QUICK, *asked, "--sampler", "rcm", "--no-guard"]
    assert main([*asked, "--out", str(video)]) == 0, capsys.readouterr()
    assert video.stat().st_size > 500 and latents[0].isfinite().all()
    assert main([*command[:3], "--base", str(base), "--force"]) == 2
    assert "2 transformers, and 1 checkpoints" in capsys.readouterr().err


def test_another_base_is_refused(pth: Path, tmp_path: Path, capsys) -> None:
    base = base_folder(tmp_path / "base")
    path = base / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3, "text_dim": 7}))
    out = tmp_path / "out"
    assert main(["convert", str(pth), str(out), "--base", str(base)]) == 2
    text = capsys.readouterr().err
    assert "num_layers: 3 there, 2 in the checkpoint" in text and "text_dim" in text
    for wrong, text in (
        (tmp_path, "no model_index.json"), (base / "transformer", "no model_index.json"),
        (TINY_COGVIDEOX, "_class_name"),
    ):  # fmt: skip
        assert main(["convert", str(pth), str(out), "--base", str(wrong)]) == 2
        assert text in capsys.readouterr().err
    assert main(["convert", str(pth), str(base), "--base", str(base), "--force"]) == 2
    assert not out.exists() and (base / "vae").is_dir()


def test_settings_and_heads_are_those_of_the_base(tmp_path: Path, capsys) -> None:
    """But not the guidance of a teacher; and without a base it says which heads it takes."""
    base, pth, out = base_folder(tmp_path / "base"), tmp_path / "dense.pth", tmp_path / "out"
    save(Options(text=32, head_dim=64), pth)
    path = base / "transformer" / "config.json"
    heads = {"num_attention_heads": 4, "attention_head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | heads))
    teacher = {"sampler": "scheduler", "steps": 50, "guidance_scale": 5.0, "guidance_scale_2": 3.0}
    (base / "turbo_rcm.json").write_text(json.dumps(teacher | {"height": 64, "note": "mine"}))
    for more, code, text in (
        (["--base", base, "--heads", 2], 2, "num_attention_heads: 4 there, 2 in the checkpoint"),
        (["--heads", 4], 0, ""),
        (["--force"], 0, "2 heads of 128 channels: --heads N if that is wrong"),
        (["--force", "--base", base], 0, ""),
    ):
        assert main(["convert", str(pth), str(out), *map(str, more)]) == code
        told = " ".join("".join(capsys.readouterr()).split())
        assert text in told and ("in the checkpoint" in told or "channels" in told) == bool(text)
    heads["rope_max_seq_len"] = 64  # which no weight shows
    assert heads.items() <= json.loads((out / "transformer" / "config.json").read_text()).items()
    assert (out / "vae").is_symlink() and (out / "text_encoder").resolve() == base / "text_encoder"
    scheduler = load_pipeline(out, device="cpu").scheduler
    assert isinstance(scheduler, RCMScheduler) and scheduler.config.sigma_max == 80
    own = {"sampler": "rcm", "steps": 4, "sigma_max": 80.0, "guidance_scale": 1.0}
    assert json.loads((out / "turbo_rcm.json").read_text()) == own | {"height": 64}
    every = {field.name for field in fields(Settings)}
    dropped = {"guidance_scale_2", "lora"}
    assert every == {*_KEPT, *own, *dropped}, "convert decides about every setting"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base") / "base")


@pytest.mark.parametrize("arguments", ["--copy", "--low-noise x"])
def test_arguments_that_need_a_base(arguments: str, pth: Path, tmp_path, capsys) -> None:
    assert main(["convert", str(pth), str(tmp_path / "out"), *arguments.split()]) == 2
    assert "expected: --base too" in capsys.readouterr().err


def test_what_is_there_is_replaced_only_if_told(pth: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(pth), str(out)]) == 0
    before = everything(out)
    assert main(["convert", str(pth), str(out), "--dtype", "float16"]) == 2
    assert "pass --force" in capsys.readouterr().err
    assert everything(out) == before
    assert main(["convert", str(pth), str(out), "--dtype", "float16", "--force"]) == 0
    assert (out / EXTRA_FILE).read_bytes() == before[EXTRA_FILE]
    name = "diffusion_pytorch_model.safetensors"
    assert (out / name).read_bytes() != before[name]
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").write_bytes(b"a cat")
    assert main(["convert", str(pth), str(other), "--force"]) == 2
    assert "is not replaced" in capsys.readouterr().err
    assert main(["convert", str(pth), str(pth), "--force"]) == 2
    shutil.copy(pth, out / "in.pth")  # beside a config.json, which makes the folder a model's
    assert main(["convert", str(out / "in.pth"), str(out), "--force"]) == 2
    assert (out / "in.pth").is_file()
    assert listing(other) == ["cat.png"] and listing(tmp_path) == ["in.pth", "out", "photos"]


def test_room_for_copies_and_links(
    pth: Path, tmp_path: Path, whole: Path, monkeypatch: Any
) -> None:
    """Copies of the base need room too, and links none; a disk without links asks for copies."""
    base = Path(shutil.copytree(whole, tmp_path / "base"))
    (base / "vae" / "large.dat").touch()
    os.truncate(base / "vae" / "large.dat", 2**40)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**36))
    with pytest.raises(OutputExistsError, match="too little space for out"):
        convert_pipeline(pth, tmp_path / "out", base=base, copy=True)
    convert_pipeline(pth, tmp_path / "out", base=base)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, "a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refused)
    with pytest.raises(OutputExistsError, match="--copy"):
        convert_pipeline(pth, tmp_path / "other", base=base)
    assert listing(tmp_path) == ["base", "in.pth", "out"]


@pytest.mark.parametrize("links", ["folders", "files"])
def test_a_base_that_links_into_the_target_is_refused(links, whole, pth, tmp_path) -> None:
    main_folder, other = tmp_path / "main", tmp_path / "other"
    convert_pipeline(pth, main_folder, base=whole, copy=True)
    weights = main_folder / "vae" / "diffusion_pytorch_model.safetensors"
    if links == "folders":
        convert_pipeline(pth, other, base=main_folder)
    else:
        shutil.copytree(whole, other)
        (other / "vae" / weights.name).unlink()
        (other / "vae" / weights.name).symlink_to(weights)
    for copy in (False, True):
        with pytest.raises(OutputExistsError, match="which is read"):
            convert_pipeline(pth, main_folder, base=other, copy=copy, force=True)
    assert load_file(weights) and not (main_folder / "vae").is_symlink()


# Bases that are wrong.


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def words(path: Path) -> None:
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "x")))


def leads_out(path: Path) -> None:
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"../secret": ["diffusers", "AutoencoderKLWan"]}))


WRONG: list[tuple[str, Callable[[Path], None]]] = [
    ("model_index.json", gone), ("model_index.json", cut), ("model_index.json", words),
    ("model_index.json", leads_out),
    ("transformer/config.json", cut), ("transformer/config.json", words),
    ("vae/config.json", gone), ("vae/config.json", cut),
    ("vae/diffusion_pytorch_model.safetensors", gone),
    ("vae/diffusion_pytorch_model.safetensors", cut),
    ("text_encoder/config.json", gone), ("text_encoder/model.safetensors", cut),
    ("tokenizer/tokenizer_config.json", cut),
]  # fmt: skip


def test_a_wrong_base_is_named(whole: Path, pth: Path, tmp_path: Path) -> None:
    base, out = Path(shutil.copytree(whole, tmp_path / "base")), tmp_path / "out"
    for file, damage in WRONG:
        before = (base / file).read_bytes()
        damage(base / file)
        with pytest.raises(TurboRCMError) as caught:
            convert_pipeline(pth, out, base=base)
        assert str(base) in str(caught.value) and file.split("/")[0] in str(caught.value), file
        assert not out.exists()
        (base / file).write_bytes(before)
    convert_pipeline(pth, out, base=base)
