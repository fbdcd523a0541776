"""The benchmarks on a CPU with toy sizes: what is measured, refused, kept and written."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from benchmarks import attention, network, pipeline, runner
from benchmarks.__main__ import main
from benchmarks.models import build_wan
from benchmarks.runner import Plan
from benchmarks.ways import WAYS
from tests.processes import server

CASE = "H12-N2048-D128"


def run(benchmark: str, only: str, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the file, by case and method."""
    given = [benchmark, "--micro", "--device", "cpu", "--only", only, "--out", str(out), *more]
    code = main(given)
    path = out / f"{benchmark}.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


def _printing_to(rank: int, path: Path, function: Callable[..., None], *given: object) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    function(rank, *given)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fresh processes come from a server that has imported torch and diffusers."""
    context, said = server(), tmp_path / "said"

    def spawned(function: Callable[..., None], given: tuple[object, ...], **how: Any) -> None:
        start_processes(_printing_to, (said, function, *given), start_method="forkserver", **how)
        print(said.read_text())

    monkeypatch.setattr(pipeline.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(import_module("benchmarks.parallel"), "spawn", spawned)


#: Benchmark -> names for --only, the case, and the methods that this machine cannot run.
RUNS = [
    ("attention", "fused auto,fused int8,torch,FlashAttention-3", CASE, {"FlashAttention-3"}),
    ("sparse", "fused dense int8,fused sparse", "H12-N32760-D128-k0.1", set()),
    ("network", "cogvideox-5b,eager,sage,patched compile", "cogvideox-5b", {"sage"}),
    ("length", "780,eager,sage,patched,patched int8 Linears", "780", {"sage"}),
    ("pipeline", "1.3b-sla-4-steps,unpatched,patched", "1.3b-sla-4-steps", set()),
    ("vae", "wan2.1-decode,bf16,bf16 patched", "wan2.1-decode", set()),
    ("vae", "wan2.2-encode,bf16,bf16 patched", "wan2.2-encode", set()),
    ("parallel", "1.3b,Ulysses patched", "1.3b", set()),
]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("name", "only", "case", "missing"), RUNS, ids=lambda one: str(one)[:20])
def test_every_method_is_checked_and_timed(name, only, case, missing, tmp_path, capfd) -> None:
    code, document = run(name, only, tmp_path)
    said = capfd.readouterr().out
    assert code == 0, said
    for key in ("machine", "versions", "code", "about"):
        assert document[key], key
    assert document["runs"][0]["command"].startswith(f"python -m benchmarks {name}")
    assert list(document["cases"]) == [case]
    for method, record in document["cases"][case]["methods"].items():
        assert "-sla" not in case or runner.is_patched(method), "the author's is dense attention"
        assert f"| {case} | {method} |" in said
        if method in missing:
            assert record["status"] == "missing" and record["reason"] in said
            continue
        assert record["status"] == "timed", record
        if "ms" in record:
            assert 0 < record["ms"]["p20"] <= record["ms"]["median"] <= record["ms"]["p80"]
            assert record["error"] < 0.03
        else:
            seconds = record.get("first_seconds") or record["seconds"]
            assert record.get("same_bits", True) and seconds > 0
        if name == "pipeline":
            denoising, decoding = record["denoise_seconds"], record["decode_seconds"]
            assert denoising > 0 and decoding > 0
            assert denoising + decoding == pytest.approx(record["second_seconds"])


@pytest.mark.parametrize(("measured", "forwards"), [(False, [2]), (True, [4, 4])])
def test_a_pipeline_is_warmed_by_one_step_and_measured_by_two_videos(
    measured: bool,
    forwards: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With guidance a step has two forwards; a toy video has two steps. Each phase says at its end
    how long it took."""
    found, build = [0], pipeline.build_pipeline

    def counting(*given: Any) -> Any:
        pipe, video = build(*given)

        def forward(*_: object) -> None:
            found[-1] += 1

        pipe.transformer.register_forward_hook(forward)
        pipe.vae.post_quant_conv.register_forward_hook(lambda *_: found.append(0))
        return pipe, video

    monkeypatch.setattr(pipeline, "build_pipeline", counting)
    plan = Plan(out=tmp_path, device="cpu", micro=True)
    method = "patched guard off"
    record = pipeline._videos(plan, "1.3b-30-steps", method, time.time() - 7, measured)
    assert found[:-1] == forwards and ("second_seconds" in record) == measured
    phases = ["start 7", "weights", "patch", "first video", *["second"] * measured]
    line = ", ".join(rf"{phase}[ .]\d+(\.\d)?" for phase in phases)
    head = f"1.3b-30-steps, {method}{', one step' * (not measured)}"
    assert re.fullmatch(rf"{head}: {line} s\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("method", "warmed"),
    [("unpatched", False), ("compile sage bf16 VAE", True), ("patched", True)],
)
def test_a_process_ahead_warms_what_compiles_kernels(
    method: str, warmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, _: Any, *given: Any) -> Any:  # type: ignore[override]
            asked.append(given[-1])
            return super().submit(lambda: {"finite": True, "same_bits": True})

    monkeypatch.setattr(pipeline, "ProcessPoolExecutor", lambda workers, **_: Pool(workers))
    plan = Plan(out=tmp_path, device="cpu", micro=True)
    pipeline._fresh(plan, "1.3b-30-steps", method, {})
    assert asked == [False] * warmed + [True]


@pytest.mark.usefixtures("forked")
def test_a_video_on_two_ranks_has_the_bits_of_one(tmp_path: Path) -> None:
    alone = ["one GPU eager", "one GPU patched"]
    split = ["CFG eager", "CFG patched", "CFG patched decoded alone"]
    code, document = run("parallel", ",".join(["1.3b-video", *alone, *split]), tmp_path)
    found = document["cases"]["1.3b-video"]["methods"]
    assert code == 0 and list(found) == alone + split, found
    for method, record in found.items():
        assert record["status"] == "timed" and record["error"] < 0.03, record
        assert record["ms"]["median"] > 0 and record["video_seconds"] > 0
        if method in split:
            assert record["same_on_all_ranks"] and record["same_as_one"]
            assert record["of_one"] > 0 and record["video_of_one"] > 0
    together = ["rows over 2 ranks" in str(found[one]["ran"]) for one in split[1:]]
    assert together == [True, False]


def test_fidelity_shows_what_the_guard_is_worth(tmp_path: Path) -> None:
    only = "live-x8,patched,patched exact,patched guard off"
    code, document = run("fidelity", only, tmp_path)
    assert code == 0
    found = document["cases"]["live-x8"]["methods"]
    assert found["unpatched"]["of_unpatched"] == 1
    assert found["patched exact"]["of_unpatched"] < 1 < found["patched guard off"]["of_unpatched"]
    assert found["patched"]["of_unpatched"] < 1 and found["patched"]["same_bits"]
    assert found["patched"]["in_int8"] < found["patched guard off"]["in_int8"]


# --- what goes wrong -----------------------------------------------------------------------------


def zeros(heads: int, q: torch.Tensor, *_: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros_like(q)


def undefined(heads: int, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Right but for one row, which the truth need not cover."""
    right = attention.METHODS["torch"](heads, *inputs)

    def call() -> torch.Tensor:
        out = right().clone()
        out[0, 1, 0] = float("nan")
        return out

    return call


def failing(heads: int, *_: torch.Tensor) -> Callable[[], torch.Tensor]:
    raise RuntimeError("no memory\nand more")


@pytest.mark.parametrize(
    ("method", "status", "reason"),
    [
        (zeros, "wrong", "wrong: relative L2 1"),
        (undefined, "wrong", "wrong: not finite"),
        (failing, "missing", "RuntimeError: no memory"),
    ],
)
@pytest.mark.parametrize(("name", "code"), [("fused int8", 1), ("FlashAttention-3", 0)])
def test_what_is_wrong_is_not_timed_and_fails_the_command_if_it_is_this_librarys(
    name: str, code: int, method: Any, status: str, reason: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(attention.METHODS, name, method)
    got, document = run("attention", f"{CASE},torch,{name}", tmp_path)
    methods = document["cases"][CASE]["methods"]
    assert got == code and methods["torch"]["status"] == "timed"
    assert methods[name]["status"] == status and "ms" not in methods[name]
    assert methods[name]["reason"] == reason and reason in capsys.readouterr().out


def test_a_broken_network_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "BROKEN", 1e-9)
    code, document = run("network", "1.3b,patched", tmp_path)
    assert code == 1 and document["cases"]["1.3b"]["methods"]["patched"]["status"] == "wrong"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--only", "H1-N1-D1"], CASE),
        (["--only", "fused int2"], "torch cuDNN"),
        (["--calls", "0"], "--calls"),
        (["--limit", "-1"], "--limit"),
        (["--device", "tpu"], "--device"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_bad_arguments_change_nothing(given: list[str], words: str, tmp_path, capsys) -> None:
    plain = ["attention", "--micro", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*plain, *given]) == 2
    assert words in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_real_sizes_need_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "--micro" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"mine": 1}', "no JSON", '{"benchmark": "sparse"}'])
def test_a_file_of_another_origin_is_kept(text: str, tmp_path, capsys) -> None:
    path = tmp_path / "attention.json"
    path.write_text(text)
    assert main(["attention", "--micro", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "attention.json" in capsys.readouterr().err and path.read_text() == text


# --- parts ---------------------------------------------------------------------------------------


def test_parts_of_one_machine_and_code_come_together(tmp_path, monkeypatch) -> None:
    run("attention", f"{CASE},torch", tmp_path)
    _, document = run("attention", f"{CASE},fused int8", tmp_path)
    assert set(document["cases"][CASE]["methods"]) == {"torch", "fused int8"}
    assert len(document["runs"]) == 2
    monkeypatch.setattr(runner, "code_digest", lambda: "other")
    _, document = run("attention", f"{CASE},fused int8", tmp_path)
    assert set(document["cases"][CASE]["methods"]) == {"fused int8"}, "other code"


def test_the_limit_is_kept_and_what_it_cuts_is_named(tmp_path, capsys) -> None:
    _, document = run("attention", CASE, tmp_path, "--limit", "0")
    assert document["cases"] == {} and document["runs"][0]["left_out"] == [CASE]
    assert f"left out, no time: {CASE}" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_had(tmp_path, monkeypatch) -> None:
    def interrupted(heads: int, *_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(attention.METHODS, "torch cuDNN", interrupted)
    code, document = run("attention", f"{CASE},torch,torch cuDNN", tmp_path)
    assert code == 130 and list(document["cases"][CASE]["methods"]) == ["torch"]


# --- networks and clocks -------------------------------------------------------------------------


@pytest.mark.parametrize("way", [name for name in WAYS if "sage" not in name])
def test_a_way_leaves_the_network_as_it_was(way: str, tmp_path: Path) -> None:
    model = build_wan("1.3b", Plan(out=tmp_path, micro=True), torch.device("cpu"))
    before = [dict(vars(module)) for module in model.modules()]
    with WAYS[way](model, "eager"):
        pass
    after = [dict(vars(module)) for module in model.modules()]
    for one, other in zip(before, after, strict=True):
        assert one.pop("_compiled_call_impl", None) is other.pop("_compiled_call_impl", None)
        assert one == other
