"""The command: what it writes, a whole pipeline, and that nothing is ever half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from PIL import Image

from tests import processes
from tests.measures import relative_l2
from tests.turbodiffusion.wan_model import Options, save
from tests.video import micro
from turbo_rcm_patch import PatchConfig, RCMScheduler, patched
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import OutputExistsError
from turbo_rcm_patch.patching.int8_module import Int8Linear
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.patching.sla import attached_proj_l
from turbo_rcm_patch.turbodiffusion import EXTRA_FILE
from turbo_rcm_patch.turbodiffusion.staging import check_space, remove_abandoned, staged
from turbo_rcm_patch.video import generation, load, load_pipeline

TINY = Options(text=32, quant=True, sla=True, dtype=torch.bfloat16)
CONFIG: dict[str, Any] = dict(
    num_attention_heads=2, attention_head_dim=128, text_dim=32, freq_dim=32, ffn_dim=320,
    num_layers=2, rope_max_seq_len=64,
)  # fmt: skip


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    save(TINY, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def base_folder(folder: Path, *, experts: bool = False) -> Path:
    """A pipeline of the sizes of `TINY`, as a hub would have it."""
    pipe = micro.micro_image_pipe(experts=True) if experts else micro.micro_pipe()
    inputs = 12 if experts else 4
    for name in ("transformer", "transformer_2") if experts else ("transformer",):
        network = WanTransformer3DModel(**CONFIG, in_channels=inputs, out_channels=4)
        pipe.register_modules(**{name: network})
    return micro.save(pipe, folder)


def test_there_and_back(pth: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out" / "transformer"
    assert main(["convert", str(pth), str(out)]) == 0
    text = capsys.readouterr().out
    assert f"{out}: " in text and "int8 weights of 20 Linears and proj_l of 2 blocks" in text
    files = ["config.json", "diffusion_pytorch_model.safetensors", EXTRA_FILE]
    assert listing(out) == files and listing(out.parent) == ["transformer"]
    assert main(["convert", "--back", str(out), str(tmp_path / "back.pth")]) == 0
    state, back = (torch.load(p, weights_only=True) for p in (pth, tmp_path / "back.pth"))
    assert state.keys() == back.keys() and all(torch.equal(state[k], back[k]) for k in state)


def test_a_whole_pipeline_generates(pth: Path, tmp_path: Path, capsys) -> None:
    base, out = base_folder(tmp_path / "base"), tmp_path / "out"
    assert main(["convert", str(pth), str(out), "--base", str(base), "--dtype", "float32"]) == 0
    assert (out / "vae").is_symlink() and (out / "text_encoder").resolve() == base / "text_encoder"
    config = json.loads((out / "transformer" / "config.json").read_text())
    assert config["rope_max_seq_len"] == 64  # which no weight shows
    pipe = load_pipeline(out, dtype=torch.float32, device="cpu")
    assert isinstance(pipe.scheduler, RCMScheduler) and pipe.scheduler.config.sigma_max == 80
    assert attached_int8(pipe.transformer.blocks[0].attn1.to_q) is not None
    call = dict(prompt="a red circle", num_inference_steps=2, guidance_scale=1.0,
                output_type="latent", height=32, width=32, num_frames=5,
                max_sequence_length=16)  # fmt: skip
    pipe.set_progress_bar_config(disable=True)

    def generated() -> torch.Tensor:
        return pipe(**call, generator=torch.Generator().manual_seed(0)).frames

    plain = generated()
    with patched(pipe, PatchConfig(linear="int8", guard=False)):
        int8 = generated()
    assert plain.isfinite().all() and not torch.equal(plain, int8)
    assert relative_l2(int8, plain) < 0.1
    small = ["--height", "32", "--width", "32", "--num-frames", "5", "--device", "cpu"]
    small += ["--max-sequence-length", "16", "--steps", "1", "--linear", "int8"]
    video = tmp_path / "video.mp4"
    prompt = ["--prompt", "a red circle", "--out", str(video)]
    assert main(["generate", "--model", str(out), *small, *prompt]) == 0
    assert video.stat().st_size > 500
    loaded = load_pipeline(out, dtype=torch.float32, device="cpu", int8=False)
    assert attached_int8(loaded.transformer.blocks[0].attn1.to_q) is None
    assert attached_proj_l(loaded.transformer.blocks[0].attn1) is not None


def test_two_experts_and_copies(tmp_path: Path, capsys) -> None:
    base = base_folder(tmp_path / "base", experts=True)
    high, low = (tmp_path / f"{name}.pth" for name in ("high", "low"))
    options = Options(text=32, inputs=12, sla=True)
    states = [save(options, high, seed=1), save(options, low, seed=2)]
    out = tmp_path / "out"
    command = ["convert", str(high), str(out), "--low-noise", str(low), "--base", str(base)]
    assert main([*command, "--copy"]) == 0
    assert not any(path.is_symlink() for path in out.iterdir())
    pipe = DiffusionPipeline.from_pretrained(out, local_files_only=True)
    for part, state in zip((pipe.transformer, pipe.transformer_2), states, strict=True):
        assert torch.equal(part.proj_out.weight, state["head.head.weight"])
    assert pipe.scheduler.config.sigma_max == 200 and pipe.config.boundary_ratio == 0.9
    assert (out / "transformer_2" / EXTRA_FILE).is_file()
    assert main([*command[:3], "--base", str(base), "--force"]) == 2
    assert "2 transformers, and 1 checkpoints" in capsys.readouterr().err


def is_hooked(part: torch.nn.Module) -> bool:
    return any("_hf_hook" in vars(m) or "_diffusers_hook" in vars(m) for m in part.modules())


def test_a_whole_a14b_through_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As on a card of 24 GiB: two -quant experts converted to int8 alone, then a video from an
    image with every component offloaded, SLA and the rCM sampler. A CPU stands for the card."""
    base = base_folder(tmp_path / "base", experts=True)
    high, low = (tmp_path / f"{name}.pth" for name in ("high", "low"))
    options = Options(text=32, inputs=12, sla=True, quant=True, dtype=torch.bfloat16)
    for path, seed in ((high, 1), (low, 2)):
        save(options, path, seed=seed)
    out = tmp_path / "out"
    command = ["convert", str(high), str(out), "--low-noise", str(low), "--base", str(base)]
    assert main([*command, "--int8-only"]) == 0
    picture = tmp_path / "first.png"
    Image.new("RGB", (40, 40), "teal").save(picture)
    monkeypatch.setattr(load, "check_offload", lambda *_: None)
    hooked: list[dict[str, bool]] = []
    latents: list[torch.Tensor] = []
    real = generation.generate

    def generate(pipe: Any, *given: Any, **named: Any) -> Any:
        experts = (pipe.transformer, pipe.transformer_2)
        assert all(any(type(m) is Int8Linear for m in part.modules()) for part in experts)
        for part in experts:
            linears = [m for m in part.blocks.modules() if type(m) is torch.nn.Linear]
            assert not linears, "no 16-bit weight of a block is left"
        modules = {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
        hooked.append({name: is_hooked(part) for name, part in modules.items()})
        made = real(pipe, *given, **named)
        latents.append(made.latents)
        return made

    monkeypatch.setattr(generation, "generate", generate)
    asked = ["generate", "--model", str(out), "--linear", "int8-only", "--image", str(picture)]
    asked += ["--height", "32", "--width", "32", "--num-frames", "5", "--device", "cpu"]
    asked += ["--max-sequence-length", "16", "--sampler", "rcm", "--steps", "4", "--no-guard"]
    asked += ["--prompt", "a red circle"]
    for offload in ("none", "group", "model"):
        video = tmp_path / f"{offload}.mp4"
        assert main([*asked, "--offload", offload, "--out", str(video)]) == 0, capsys.readouterr()
        assert video.stat().st_size > 500
    parts = ["vae", "text_encoder", "transformer", "transformer_2"]
    assert hooked == [dict.fromkeys(parts, offloaded) for offloaded in (False, True, True)]
    assert latents[0].isfinite().all()
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])


def test_another_base_is_refused(pth: Path, tmp_path: Path, capsys) -> None:
    base = base_folder(tmp_path / "base")
    path = base / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3, "text_dim": 7}))
    out = tmp_path / "out"
    assert main(["convert", str(pth), str(out), "--base", str(base)]) == 2
    text = capsys.readouterr().err
    assert "num_layers: 3 there, 2 in the checkpoint" in text and "text_dim" in text
    assert main(["convert", str(pth), str(out), "--base", str(tmp_path)]) == 2
    assert "no model_index.json" in capsys.readouterr().err
    assert main(["convert", str(pth), str(base), "--base", str(base), "--force"]) == 2
    assert not out.exists() and (base / "vae").is_dir()


@pytest.mark.parametrize(
    "arguments", ["--back --dtype float16", "--copy", "--low-noise x", "--back --base x"]
)
def test_arguments_that_do_not_go_together(
    arguments: str, pth: Path, tmp_path: Path, capsys
) -> None:
    assert main(["convert", str(pth), str(tmp_path / "out"), *arguments.split()]) == 2
    assert "expected: not to be given here" in capsys.readouterr().err


def test_what_is_there_is_replaced_only_if_told(pth: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(pth), str(out)]) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert main(["convert", str(pth), str(out), "--dtype", "float16"]) == 2
    assert "pass --force" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert main(["convert", str(pth), str(out), "--dtype", "float16", "--force"]) == 0
    assert (out / EXTRA_FILE).read_bytes() == before[EXTRA_FILE]
    name = "diffusion_pytorch_model.safetensors"
    assert (out / name).read_bytes() != before[name]
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").write_bytes(b"a cat")
    assert main(["convert", str(pth), str(other), "--force"]) == 2
    assert "a folder without a model" in capsys.readouterr().err
    assert main(["convert", str(pth), str(pth), "--force"]) == 2
    assert main(["convert", "--back", str(out), str(out), "--force"]) == 2
    assert "is not replaced" in capsys.readouterr().err and (out / "config.json").is_file()
    assert listing(other) == ["cat.png"] and listing(tmp_path) == ["in.pth", "out", "photos"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_failure_leaves_what_was_there(failure: type[BaseException], tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "config.json").write_text("{}")
    with pytest.raises(failure), staged(old, force=True, folder=True) as made:
        (made / "config.json").write_text("half")
        raise failure
    assert listing(tmp_path) == ["out"] and (old / "config.json").read_text() == "{}"


def test_a_full_or_closed_disk_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutputExistsError, match="too little space for out"):
        check_space(tmp_path / "new" / "out", 2**60)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputExistsError, match="cannot be written to"),
        staged(tmp_path / "file" / "out", force=False, folder=True),
    ):
        pass


def test_copies_of_the_base_need_room_too(
    pth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """A base as the hub's cache has it, whose files are links; its transformer is not copied."""
    base, blobs, out = base_folder(tmp_path / "base"), tmp_path / "blobs", tmp_path / "out"
    blobs.mkdir()
    vae = base / "vae" / "diffusion_pytorch_model.safetensors"
    vae.rename(blobs / "vae")
    vae.symlink_to(blobs / "vae")
    (blobs / "large").touch()
    os.truncate(blobs / "large", 2**27)
    (base / "vae" / "large.dat").symlink_to(blobs / "large")
    os.truncate(next((base / "transformer").glob("*.safetensors")), 2**30)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**26))
    command = ["convert", str(pth), str(out), "--base", str(base)]
    assert main([*command, "--copy"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert (
        "too little space for out" in text
        and "0.1 GiB of them copies" in text
        and "--copy" in text
    )
    assert main(command) == 0 and (out / "vae").is_symlink()
    vae.unlink()
    vae.symlink_to(blobs / "nothing")
    assert main([*command, "--copy", "--force"]) == 2
    assert "is a broken link" in capsys.readouterr().err and (out / "vae").is_symlink()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A live one's folder stays, with what shares the name but is no lockable folder of ours."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from turbo_rcm_patch.turbodiffusion.staging import staged\n"
        "with staged(Path(sys.argv[1]), force=False, folder=True) as made:\n"
        "    print(made.parent.name, flush=True); time.sleep(600)"
    )
    out = tmp_path / "out"
    with (
        processes.start(code, str(out)) as first,
        processes.start(code, str(out)) as second,
    ):
        deadline = time.monotonic() + 120
        while not (first.out.endswith("\n") and second.out.endswith("\n")):
            assert first.code is None and second.code is None and time.monotonic() < deadline
            time.sleep(0.02)
        killed, alive = first.out.strip(), second.out.strip()
        (tmp_path / ".out.partial-mine").mkdir()
        first.kill()
        assert (tmp_path / killed).is_dir()
        remove_abandoned(out)
        left = {alive, ".out.partial-mine"}
        assert set(listing(tmp_path)) == left
        with staged(out, force=False, folder=True) as made:
            (made / "config.json").write_text("{}")
            remove_abandoned(out)
            assert made.is_dir(), "not its own"
        assert set(listing(tmp_path)) == {*left, "out"}


def test_a_model_that_was_on_its_way_out_is_put_back(tmp_path: Path) -> None:
    """Killed between two renames, a process leaves the only copy there is of what was replaced."""
    place, out = tmp_path / ".out.partial-killed", tmp_path / "out"
    for there in ("first", "second"):
        (place / "old").mkdir(parents=True)
        (place / "old" / "config.json").write_text(there)
        (place / "lock").touch()
        remove_abandoned(out)
        assert listing(tmp_path) == ["out"], "and the second is of no use any more"
        assert (out / "config.json").read_text() == "first"
    with (
        pytest.raises(OutputExistsError, match="already exists"),
        staged(out, force=False, folder=True),
    ):
        raise AssertionError("it is told before hours of work")


def test_room_is_made_before_it_is_measured(
    pth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, usage = tmp_path / "out", shutil.disk_usage(tmp_path)
    (tmp_path / ".out.partial-killed").mkdir()
    (tmp_path / ".out.partial-killed" / "lock").touch()

    def left(_: object) -> Any:
        return usage._replace(free=0 if list(tmp_path.glob(".out.partial-*")) else usage.free)

    monkeypatch.setattr(shutil, "disk_usage", left)
    assert main(["convert", str(pth), str(out)]) == 0


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The process is stopped in the middle of writing: after its first tensor it waits here."""
    save(Options(text=32), tmp_path / "in.pth")
    out = tmp_path / "out"
    code = (
        "import sys, time\n"
        "from turbo_rcm_patch.turbodiffusion import folder\n"
        "write = folder._Item.tensor\n"
        "def slow(self):\n"
        "    print('writes', flush=True); time.sleep(0.2); return write(self)\n"
        "folder._Item.tensor = slow\n"
        "from turbo_rcm_patch.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    with processes.start(code, "convert", str(tmp_path / "in.pth"), str(out)) as process:
        deadline = time.monotonic() + 60
        while process.out.count("writes") < 2:
            assert process.code is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert list(tmp_path.glob(".out.partial-*/new"))
        os.kill(process.pid, signal.SIGINT)
        done = process.wait(60)
    assert done.code == 130 and "Nothing was written" in done.err
    assert "Traceback" not in done.err and listing(tmp_path) == ["in.pth"]


def test_what_is_read_is_never_replaced(pth: Path, tmp_path: Path, capsys) -> None:
    """A checkpoint downloaded beside its config.json, which makes the folder look like a model."""
    out = tmp_path / "download"
    out.mkdir()
    (out / "config.json").write_text("{}")
    inside = out / "model.pth"
    inside.write_bytes(pth.read_bytes())
    assert main(["convert", str(inside), str(out), "--force"]) == 2
    assert "which is read" in capsys.readouterr().err
    assert listing(out) == ["config.json", "model.pth"]


def test_a_page_saved_as_a_checkpoint_is_a_typed_error(tmp_path: Path, capsys) -> None:
    for text in ("error", "hello", "upstream connect error or disconnect/reset before headers"):
        (tmp_path / "in.pth").write_text(text)
        assert main(["convert", str(tmp_path / "in.pth"), str(tmp_path / "out")]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_of_two_experts_one_is_chosen(pth: Path, tmp_path: Path, capsys) -> None:
    for part in ("transformer", "transformer_2"):
        assert main(["convert", str(pth), str(tmp_path / "pipe" / part)]) == 0
    assert main(["convert", "--back", str(tmp_path / "pipe"), str(tmp_path / "back.pth")]) == 2
    assert "two experts" in capsys.readouterr().err
