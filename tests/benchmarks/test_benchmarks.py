"""The benchmarks on a CPU with toy sizes: what is measured, refused, kept and written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from benchmarks.__main__ import main
from benchmarks.models import WAYS, build_network
from benchmarks.runner import Plan, Wrong, checked_error, is_patched
from tests.processes import server

ROOT = Path(__file__).parents[2]
CASE = "H12-N2048-D128"
attention, network, pipeline, parallel = (
    import_module(f"benchmarks.{name}")
    for name in ("attention", "network", "pipeline", "parallel")
)


def run(benchmark: str, only: str, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the file."""
    options = ["--micro", "--device", "cpu", "--only", only, "--out", str(out), *more]
    code = main([benchmark, *options])
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
    monkeypatch.setattr(parallel, "spawn", spawned)


#: Benchmark -> names for --only, the case, and the methods that this machine cannot run.
RUNS = [
    ("attention", "fused int8,torch,sageattention", CASE, {"sageattention"}),
    ("attention", "fused dense int8,fused sparse", "H12-N32760-D128-k0.1", set()),
    ("network", "eager,patched", "cogvideox-5b", set()),
    ("network", "eager,sage,patched reduce-overhead", "1.3b-780", {"sage"}),
    ("pipeline", "unpatched bf16 VAE,patched bf16 VAE", "1.3b-sla-4-steps", set()),
    ("vae", "bf16,bf16 patched", "wan2.2-encode", set()),
    ("parallel", "Ulysses patched", "1.3b", set()),
]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "only", "case", "missing"), RUNS, ids=[f"{name}-{case}" for name, _, case, _ in RUNS]
)
def test_every_method_is_checked_and_timed(name, only, case, missing, tmp_path, capfd) -> None:
    code, document = run(name, f"{case},{only}", tmp_path)
    said = capfd.readouterr().out
    assert code == 0, said
    for key in ("machine", "versions", "code", "date"):
        assert document[key], key
    assert document["command"].startswith(f"python -m benchmarks {name}")
    assert list(document["cases"]) == [case]
    assert said.count("| case | method |") == 1, "ranks print their own tables"
    for method, record in document["cases"][case]["methods"].items():
        assert "-sla" not in case or is_patched(method), "unpatched it is dense attention"
        assert f"| {case} | {method} |" in said
        if method in missing:
            assert record["status"] == "missing" and record["reason"] in said
            continue
        assert record["status"] == "timed", record
        if "ms" in record:
            assert record["ms"] > 0
            assert "-k0.1" in case or record["error"] < 0.03, "with SLA, time alone"
        else:
            assert record.get("same_bits", True)
            assert record.get("second_seconds", record.get("seconds")) > 0
        if name == "pipeline":
            parts = record["denoise_seconds"], record["decode_seconds"]
            assert min(parts) > 0 and sum(parts) == pytest.approx(record["second_seconds"])


@pytest.mark.parametrize(
    ("case", "method", "forwards"),
    [
        ("1.3b-30-steps", "patched bf16 VAE", [2, 4, 4]),
        ("cogvideox-5b-50-steps", "unpatched fp32 VAE", [2, 2]),
    ],
)
def test_two_videos_are_measured_after_a_process_that_compiles_kernels_in_one_step(
    case: str, method: str, forwards: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guidance a step has two forwards; a toy video has two steps. The VAE has the dtype that
    the method names, CogVideoX's too."""
    counts, dtypes, build = [0], set[str](), pipeline.build_pipeline

    def counting(*given: Any) -> Any:
        pipe, video = build(*given)

        def forward(*_: object) -> None:
            counts[-1] += 1

        def decodes(_: object, inputs: tuple[torch.Tensor], *__: object) -> None:
            if counts[-1]:
                counts.append(0)
            dtypes.add(str(inputs[0].dtype))

        pipe.transformer.register_forward_hook(forward)
        (pipe.vae.post_quant_conv or pipe.vae.decoder.conv_in).register_forward_hook(decodes)
        return pipe, video

    monkeypatch.setattr(pipeline, "build_pipeline", counting)
    threads = lambda workers, **_: ThreadPoolExecutor(workers)  # noqa: E731
    monkeypatch.setattr(pipeline, "ProcessPoolExecutor", threads)
    record: dict[str, Any] = {}
    plan = Plan(out=tmp_path, device="cpu", micro=True)
    pipeline._fresh(plan, case, method, record)
    assert [count for count in counts if count] == forwards and "second_seconds" in record
    assert dtypes == {"torch.float32" if "fp32" in method else "torch.bfloat16"}


@pytest.mark.usefixtures("forked")
def test_a_video_on_two_ranks_has_the_bits_of_one(tmp_path: Path) -> None:
    methods = ["one GPU patched", "CFG patched"]
    code, document = run("parallel", ",".join(["1.3b-video", *methods]), tmp_path)
    records = document["cases"]["1.3b-video"]["methods"]
    assert code == 0 and list(records) == methods, records
    for record in records.values():
        assert record["status"] == "timed" and record["error"] < 0.03, record
        assert record["ms"] > 0 and record["video_seconds"] > 0
    split = records["CFG patched"]
    assert split["same_on_all_ranks"] and split["same_as_one"]
    assert "rows over 2 ranks" in str(split["ran"])


def test_fidelity_shows_what_the_guard_is_worth(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(network.WAYS, "patched exact guard on", WAYS["patched"])
    code, document = run(
        "network", "1.3b-live-x8,patched guard on,patched exact guard on", tmp_path
    )
    assert code == 0
    guarded, unguarded = document["cases"]["1.3b-live-x8"]["methods"].values()
    assert guarded["error_of_eager"] < 1 < unguarded["error_of_eager"]
    assert guarded["predicted"] > 0 and guarded["in_int8"] < unguarded["in_int8"]


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
    ("name", "code", "method", "status", "reason"),
    [
        ("fused int8", 1, zeros, "wrong", "wrong: relative L2 1"),
        ("fused int8", 1, undefined, "wrong", "wrong: not finite"),
        ("fused int8", 1, failing, "missing", "RuntimeError: no memory"),
        ("sageattention", 0, failing, "missing", "RuntimeError: no memory"),
    ],
)
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


def test_an_output_that_is_not_finite_is_wrong() -> None:
    with pytest.raises(Wrong, match="nan"):
        checked_error(torch.tensor([1.0, torch.nan]), torch.ones(2), 0.1)


def test_a_broken_network_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "BROKEN", 1e-9)
    code, document = run("network", "1.3b,patched", tmp_path)
    assert code == 1 and document["cases"]["1.3b"]["methods"]["patched"]["status"] == "wrong"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--micro", "--only", "H1-N1-D1"], CASE),
        (["--micro", "--only", "fused int2"], "torch cuDNN"),
        (["--micro"], "attention.json"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_bad_arguments_change_nothing(given: list[str], words: str, tmp_path, capsys) -> None:
    kept = tmp_path / words
    if words.endswith(".json"):
        kept.write_text("mine")
    assert main(["attention", "--device", "cpu", "--out", str(tmp_path), *given]) == 2
    assert words in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"] * kept.exists()


def test_an_interrupted_run_keeps_what_it_had(tmp_path, monkeypatch) -> None:
    def interrupted(heads: int, *_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(attention.METHODS, "torch cuDNN", interrupted)
    code, document = run("attention", f"{CASE},torch,torch cuDNN", tmp_path)
    assert code == 130 and list(document["cases"][CASE]["methods"]) == ["torch"]


@pytest.mark.parametrize("way", ["patched", "patched reduce-overhead"])
def test_a_way_leaves_the_network_as_it_was(way: str, tmp_path: Path) -> None:
    model = build_network("1.3b", Plan(out=tmp_path, micro=True), torch.device("cpu"))
    before = [dict(vars(module)) for module in model.modules()]
    with WAYS[way].entered(model, "eager"):
        pass
    after = [dict(vars(module)) for module in model.modules()]
    for old, new in zip(before, after, strict=True):
        assert old.pop("_compiled_call_impl", None) is new.pop("_compiled_call_impl", None)
        assert old == new
