"""`parallel` is set up, refuses and is undone, over real ranks on a CPU.

`tests/test_several_ranks.py` compares what the ranks compute.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig
from torch import nn

from tests import processes
from tests.measures import relative_l2
from tests.patching.test_symmetric import mapped
from tests.patching.vae import conv_in_float64
from tests.ranks import on_ranks
from tests.test_several_ranks import (
    PROMPT,
    STEPS,
    counted,
    gather_uneven,
    latents,
    same_everywhere,
)
from tests.video.micro import QUICK, SMALL, micro_pipe, options, skyreels
from tests.video.micro_cogvideox import micro_cogvideox
from turbo_rcm_patch import is_patched, parallel, patch_model, patched, report_of, unpatch_model
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ContextParallelError, WrappedError
from turbo_rcm_patch.patching import vae as patching_vae
from turbo_rcm_patch.patching.vae import share
from turbo_rcm_patch.video import generate

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
ROOT = Path(__file__).parents[2]


def networks(pipe: Any) -> list[nn.Module]:
    both = (pipe.transformer, getattr(pipe, "transformer_2", None))
    return [one for one in both if one is not None]


def decodes_rows(rank: int, patch_first: bool) -> None:
    patching_vae.conv3d = conv_in_float64  # torch's sums on a CPU depend on the height
    pipe, call = micro_pipe(), {"sampler": "scheduler", "steps": 1, **SMALL}
    generate(pipe, PROMPT, **call)  # The author's code leaves its scratch there.
    before = {*vars(pipe.vae)}
    with patched(pipe, guard=False):
        expected = generate(pipe, PROMPT, **call).frames
    if patch_first:
        patch_model(pipe, guard=False)
    with parallel(pipe, cfg=2):
        if not patch_first:
            patch_model(pipe, guard=False)
        report = report_of(pipe)
        assert torch.equal(generate(pipe, PROMPT, **call).frames, expected)
        assert "rows over 2 ranks" in report.ran()["vae.decoder"]
        unpatch_model(pipe)
        unpatched = generate(pipe, PROMPT, **call).frames
    assert torch.equal(generate(pipe, PROMPT, **call).frames, unpatched)
    assert {*vars(pipe.vae)} == before
    with patched(pipe, guard=False) as report, parallel(pipe, cfg=2, vae=False):
        assert torch.equal(generate(pipe, PROMPT, **call).frames, expected)
        assert "rows over" not in report.ran()["vae.decoder"]
    with patched(pipe, guard=False) as report:
        share(pipe.vae, dist.group.WORLD)
        parallel(pipe, cfg=2).undo()
        assert torch.equal(generate(pipe, PROMPT, **call).frames, expected)
        assert "rows over 2 ranks" in report.ran()["vae.decoder"]  # as before


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_patched_vae_decodes_rows_on_all_ranks(patch_first: bool) -> None:
    on_ranks(2, decodes_rows, patch_first)


def shares_forwards_and_sequence(rank: int, folder: str, patch_first: bool) -> None:
    """Two by two ranks, as torch sees the pipeline afterwards, and with no patch."""
    pipe = micro_pipe(experts=True)
    options: dict[str, Any] = {"attention": "int8", "guard": False}
    alone = latents(pipe, {})
    with patched(pipe, **options):
        expected = latents(pipe, {})
    before = [{name: {*vars(one)} for name, one in net.named_modules()} for net in networks(pipe)]
    if patch_first:
        patch_model(pipe, **options)
    shared = parallel(pipe, cfg=2, ulysses=2)
    if not patch_first:
        made = latents(pipe, {})
        assert relative_l2(made, alone) < 1e-4 and same_everywhere(made)
        patch_model(pipe, **options)
    made = latents(pipe, {})
    assert relative_l2(made, expected) < 5e-3 and same_everywhere(made)
    report = str(report_of(pipe))
    assert "transformer on ranks 0, 1, 2, 3: 2 blocks fused with int8 attention" in report
    assert "transformer_2 on ranks 0, 1, 2, 3: 2 blocks fused with int8 attention" in report
    assert "parallel over 2 ranks" in report
    with mapped(folder):  # Each pair of ranks has memory of its own, and both networks use it.
        assert torch.equal(latents(pipe, {}), made)
        assert "in symmetric memory" in str(report_of(pipe))
    if patch_first:
        shared.undo()
        assert torch.equal(latents(pipe, {}), expected)
        unpatch_model(pipe)
    else:
        unpatch_model(pipe)
        shared.undo()
    shared.undo()
    assert torch.equal(latents(pipe, {}), alone)
    after = [{name: {*vars(one)} for name, one in net.named_modules()} for net in networks(pipe)]
    for one, other in zip(before, after, strict=True):
        changed = {name: other[name] ^ one[name] for name in one if other[name] != one[name]}
        assert not (patch_first and changed), changed


def in_either_order(rank: int, folder: str) -> None:
    for patch_first in (True, False):
        shares_forwards_and_sequence(rank, folder, patch_first)


def test_both_are_set_up_and_undone_in_one_call(tmp_path: Path) -> None:
    with_devices(4, in_either_order, str(tmp_path))


def with_devices(ranks: int, function: Callable[..., None], *args: object) -> None:
    on_ranks(ranks, _counted_devices, function, *args)


def _counted_devices(rank: int, function: Callable[..., None], *args: object) -> None:
    """diffusers counts accelerators, of which a CPU machine has none."""
    with mock.patch.object(torch.accelerator, "device_count", return_value=4):
        function(rank, *args)


def deals_out_uneven_heads(rank: int) -> None:
    pipe = micro_pipe()
    with pytest.raises(ContextParallelError, match="patch_model first"):
        parallel(pipe, ulysses=3)  # diffusers refuses two heads on three ranks
    options: dict[str, Any] = {"attention": "int8", "guard": False}
    with patched(pipe, **options):
        expected = latents(pipe, {})
        with mock.patch.object(dist, "all_gather", gather_uneven), parallel(pipe, ulysses=3):
            made = latents(pipe, {})
    assert relative_l2(made, expected) < 5e-3


def test_heads_that_the_ranks_do_not_divide_are_dealt_out() -> None:
    with_devices(3, deals_out_uneven_heads)


def with_another_prompt(pipe: Any) -> torch.Tensor:
    """Latents where a callback changes the negative prompt after the first step."""

    def change(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {name: x if step else 2 * x + 1 for name, x in values.items()}

    made: torch.Tensor = pipe(
        prompt=PROMPT, negative_prompt="green", guidance_scale=5.0, num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0), output_type="latent", **SMALL,
        callback_on_step_end=change, callback_on_step_end_tensor_inputs=["negative_prompt_embeds"],
    ).frames  # fmt: skip
    return made


def differs_without_harm(rank: int) -> None:
    """Guidance off, an interruption, and inputs that differ between ranks."""
    pipe = micro_pipe()
    one, many, changed = latents(pipe, {}, 1.0), latents(pipe, {}), with_another_prompt(pipe)
    assert not torch.equal(many, changed)

    class Stop(Exception):
        pass

    def stop(step: int, _: int) -> None:
        if step == 2:
            raise Stop

    shared = parallel(pipe, cfg=2)
    with pytest.raises(ContextParallelError, match=r"hidden_states of transformer.*same seed"):
        latents(pipe, {}, seed=rank)
    with pytest.raises(Stop):
        generate(pipe, PROMPT, on_step=stop, sampler="scheduler", steps=STEPS, **SMALL)
    with counted(pipe) as counts:
        assert torch.equal(latents(pipe, {}, 1.0), one)
    assert counts == {"samples": STEPS, "exchanges": 0}
    assert torch.equal(latents(pipe, {}), many)
    with counted(pipe) as counts:
        assert torch.equal(with_another_prompt(pipe), changed)
    assert counts == {"samples": STEPS + 1, "exchanges": STEPS}  # a step's second call is others'

    def refused(pattern: str, pipe: Any = pipe, **degrees: Any) -> None:
        with pytest.raises(ContextParallelError, match=pattern):
            parallel(pipe, **(degrees or {"cfg": 2}))

    refused("parallel already")
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ContextParallelError, match="FirstBlockCacheConfig"):
        latents(pipe, {})
    pipe.transformer.disable_cache()
    over = pipe.transformer.forward
    pipe.transformer.forward = lambda **named: over(**named)
    with pytest.raises(ContextParallelError, match="no other forward than"):
        latents(pipe, {})
    with pytest.raises(WrappedError):
        shared.undo()
    pipe.transformer.forward = over
    shared.undo()
    assert "forward" not in vars(pipe.transformer) and not is_patched(pipe)

    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    refused("no cache; got FirstBlockCacheConfig")
    pipe.transformer.disable_cache()
    pipe.transformer.forward = lambda **named: None
    refused("cache-dit")
    refused("4 of one group", micro_pipe(), cfg=2, ulysses=2)
    refused("cfg 1 or 2", micro_pipe(), cfg=3)
    refused("not both 1", micro_pipe(), cfg=1)
    refused("WanVACEPipeline", skyreels())
    refused("a parallel plan in diffusers", micro_cogvideox(), ulysses=2)
    with mock.patch.object(torch.accelerator, "device_count", return_value=0):
        refused("expected a GPU.*Use cfg=2 alone", micro_pipe(), ulysses=2)


def test_what_would_go_wrong_is_refused_in_words() -> None:
    on_ranks(2, differs_without_harm)


def generates_together(rank: int, folder: str, out: str) -> None:
    given = ["generate", *QUICK, "--prompt", PROMPT, "--prompt", "a blue square"]
    given += options(model=folder, sampler="scheduler", steps=3, guidance_scale=5)
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    alone = [*given, "--out", f"{out}/alone{rank}"]
    assert main(alone) == 0
    together = [*given, "--out", f"{out}/together", "--cfg-parallel", "--resume"]
    with mock.patch.dict(os.environ, environment):
        assert main(together) == 0
        assert main(together) == 0  # what is there stays
    if rank == 0:
        videos = sorted(Path(out, "alone0").glob("*.mp4"))
        assert len(videos) == 2
        for video in videos:
            assert (Path(out, "together") / video.name).read_bytes() == video.read_bytes()


def test_generate_makes_each_video_on_all_processes(micro_folder: Path, tmp_path: Path) -> None:
    on_ranks(2, generates_together, os.fspath(micro_folder), os.fspath(tmp_path))


def test_generate_alone_is_told_to_use_torchrun(micro_folder: Path, tmp_path, capsys) -> None:
    given = ["generate", "--model", os.fspath(micro_folder), "--prompt", PROMPT, "--ulysses", "2"]
    assert main([*given, "--out", os.fspath(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "torchrun --nproc-per-node 2" in " ".join(capsys.readouterr().err.split())


def test_cfg_parallel_without_guidance_is_told(micro_folder: Path, tmp_path, capsys) -> None:
    given = ["generate", *QUICK, *options(model=micro_folder, sampler="scheduler", steps=1)]
    given += ["--prompt", PROMPT, "--cfg-parallel", "--out", os.fspath(tmp_path)]
    alone = mock.patch("turbo_rcm_patch.diffusers_parallel.parallel", return_value=nullcontext())
    for scale, told in (("1", True), ("5", False)):
        with alone:
            assert main([*given, "--guidance-scale", scale]) == 0
        assert ("both groups of --cfg-parallel" in capsys.readouterr().out) == told


def test_one_process_is_refused() -> None:
    with pytest.raises(ContextParallelError, match=r"no process group.*torchrun"):
        parallel(micro_pipe(), cfg=2)


def compiles(rank: int) -> None:
    pipe = micro_pipe()
    del pipe.transformer.blocks[1]
    expected = latents(pipe, {}, steps=2)
    pipe.transformer.compile(backend="eager")
    with parallel(pipe, cfg=2):
        assert torch.equal(latents(pipe, {}, steps=2), expected)


def test_a_compiled_network_is_shared_too() -> None:
    on_ranks(2, compiles)


#: What a rank runs under torchrun. Rank 1 fails, or both wait for the test to end them.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from tests.test_several_ranks import (
    PROMPT,
    STEPS,
    counted,
    gather_uneven,
    latents,
    same_everywhere,
)
from tests.video.micro import SMALL, micro_pipe
from turbo_rcm_patch import parallel
from turbo_rcm_patch.video import generate

dist.init_process_group("gloo")

def on_step(step, _):
    # One write: both ranks have the same pipe, and unbuffered, `print` writes word by word.
    print(f"step {os.environ['RANK']} {os.getpid()}\\n", end="", flush=True)
    if sys.argv[1] == "fails" and step == 2 and os.environ["RANK"] == "1":
        raise ValueError("rank one met its end")

pipe = micro_pipe()
with parallel(pipe, cfg=2):
    more = {"sampler": "scheduler", "steps": 900, "guidance_scale": 5.0}
    generate(pipe, "a red circle", on_step=on_step, **more, **SMALL)
"""

#: torchrun, whose ranks are processes of their own.
TORCHRUN = """
import sys
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node", "2", *sys.argv[1:]])
"""


def test_a_rank_that_fails_ends_all_within_30_seconds(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.fspath(ROOT)}
    with processes.start(TORCHRUN, os.fspath(script), "fails", env=environment) as run:
        run.until(lambda: len(ranks(run.out)) == 2)
        began = time.monotonic()
        done = run.wait(60)
    assert time.monotonic() - began < 30 and done.code != 0
    assert not any(map(alive, ranks(done.out))) and "ValueError: rank one met its end" in done.err


def ranks(out: str) -> set[int]:
    """The process ids that ranks print."""
    return {int(pid) for pid in re.findall(r"^step \d (\d+)$", out, re.MULTILINE)}


def test_ctrl_c_ends_all_within_30_seconds() -> None:
    with processes.pair(SCRIPT, "goes on", cwd=ROOT) as both:
        for one in both:
            one.until(lambda one=one: "step" in one.out)
        for one in both:
            os.kill(one.pid, signal.SIGINT)
        began = time.monotonic()
        assert all(one.wait(30).code for one in both) and time.monotonic() - began < 30


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
