"""The fuzz: a slice of it finds nothing, and it finds what is planted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz import processes
from tests.fuzz import run as fuzz_run
from tests.fuzz.__main__ import main
from tests.fuzz.draw import Mismatch, close_to
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.run import Plan, cases_of, run
from turbo_rcm_patch.ops import (
    elementwise,
    emulation,
    quantize,
    reference,
    sparse_reference,
    streams,
)
from turbo_rcm_patch.patching import copies, plan, record

#: The module, which has the name of its function.
INT8_LINEAR = sys.modules["turbo_rcm_patch.ops.int8_linear"]
#: Of the slice that every change runs.
SEED = 7


@pytest.mark.parametrize("part", range(4))
def test_a_slice_finds_nothing(part: int) -> None:
    """A fixed quarter of 600 cases."""
    found = run(Plan(SEED), range(150 * part, 150 * (part + 1)), echo=False)
    assert found.cases == 150
    assert not found.failures, "\n".join(found.failures)


def test_every_operation_is_in_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn here, and run above."""
    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, lambda draw: "drawn")
    monkeypatch.setattr(fuzz_run, "run_orders", lambda *given: "models: drawn")
    found = run(Plan(SEED), range(600), echo=False)
    assert set(found.names) == {*OPERATIONS, "models"} and not found.failures


# --- what it finds -------------------------------------------------------------------------------


def replaced(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]
) -> None:
    """A function replaced wherever it was imported by its name."""
    real = getattr(owner, name)
    broken = make(real)
    for module in [m for n, m in sys.modules.items() if n.startswith("turbo_rcm_patch")]:
        for key, value in list(vars(module).items()):
            if value is real:
                monkeypatch.setattr(module, key, broken)
    if getattr(owner, name) is real:
        monkeypatch.setattr(owner, name, broken)


def one_key_more(real: Any) -> Any:
    return lambda *args, kv_lengths, **rest: real(
        *args, kv_lengths=None if kv_lengths is None else kv_lengths + 1, **rest
    )


def without(name: str) -> Callable[[Any], Any]:
    return lambda real: lambda *args, **rest: real(*args, **rest | {name: None})


def skip_of_first_sample(real: Any) -> Any:
    def close(residual: Any, branch: Any, c_skip: Any, c_out: Any, **rest: Any) -> Any:
        if isinstance(c_out, torch.Tensor):
            c_out = c_out[:1].expand_as(c_out) if c_out.dim() else c_out
        return real(residual, branch, c_skip, c_out, **rest)

    return close


def fewer_levels(real: Any) -> Any:
    return lambda x, amax, qmax: real(x, amax, qmax - 2)


def no_bias(real: Any) -> Any:
    return lambda int8, scale, a: real(int8, scale, a._replace(bias=None))


def mean_of_all(real: Any) -> Any:
    return lambda k, lengths: k[:, :, ::2].mean(2, keepdim=True) + 0.3


def stays(real: Any) -> Any:
    """Undoing leaves the last function behind."""

    def undo(self: Any) -> None:
        entries, self.entries = self.entries, self.entries[:-1]
        real(self)
        self.entries = entries

    return undo


OPS = [
    (reference, "key_mask", one_key_more),
    (reference, "close_skip", skip_of_first_sample),
    (reference, "norm_rope", without("bias")),
    (reference, "norm_rope", without("cos")),
    (reference, "project", lambda real: lambda x, w, b: real(x, w, None)),
    (emulation, "quantized", fewer_levels),
    (emulation, "sample_mean", mean_of_all),
    (emulation, "hadamard", lambda real: lambda x: real(x).roll(1, -1) * 1.004),
    (quantize, "quantized_rows", lambda real: lambda x: (real(x)[0], real(x)[1] * 1.002)),
    (INT8_LINEAR, "_closed_product", no_bias),
    (INT8_LINEAR, "scales_of_rows", lambda real: lambda s, rows: real(s, rows).roll(1, 0)),
    (elementwise, "norm_in_plain_torch",
     lambda real: lambda x, a, b, one, eps: real(x, a, b, 1.0, eps)),
    (streams, "_lengths", lambda real: lambda s: real(s)[::-1]),
    (sparse_reference, "linear_branch", lambda real: lambda *a, **k: 0.98 * real(*a, **k)),
    (sparse_reference, "block_map", lambda real: lambda *a, **k: real(*a, **k).flip(2)),
]  # fmt: skip
MODELS = [
    (record.PatchRecord, "undo", stays),
    (record.Entry, "undo", lambda real: lambda self: None),
    (copies.Copies, "_compare", lambda real: lambda self, *args: None),
    (plan.Watch, "holds", lambda real: lambda self, *args: True),
    (reference, "close_skip", skip_of_first_sample),
    (reference, "norm_rope", without("cos")),
]


def names(cases: list[Any]) -> list[str]:
    return [f"{getattr(owner, '__name__', owner).split('.')[-1]}-{n}" for owner, n, _ in cases]


def finds(
    monkeypatch: pytest.MonkeyPatch, models: float, cases: int, planted: tuple[Any, ...]
) -> None:
    replaced(monkeypatch, *planted)
    plan = Plan(SEED, models=models)
    found = run(plan, range(cases), most=1, echo=False)
    assert found.failures
    # The line runs the case again.
    case = int(found.failures[0].split("--only ")[1].split()[0])
    assert plan.command(case) in found.failures[0]
    with pytest.raises(Exception, match=r"\w"):
        plan.run(case)


@pytest.mark.parametrize("planted", OPS, ids=names(OPS))
def test_it_finds_a_fault_of_an_operation(
    planted: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(monkeypatch, 0.0, 300, planted)


@pytest.mark.parametrize("planted", MODELS, ids=names(MODELS))
def test_it_finds_a_fault_of_patching(
    planted: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(monkeypatch, 1.0, 120, planted)


# --- how it runs ---------------------------------------------------------------------------------


def test_a_case_is_the_same_every_time() -> None:
    for models in (0.0, 1.0):
        plan = Plan(3, models=models)
        assert plan.run(5) == plan.run(5)
        assert plan.run(5) != Plan(4, models=models).run(5)


def test_cases_of_a_pool_share_what_is_compiled() -> None:
    plan = Plan(SEED, pool=4, models=0.0)
    said = [plan.run(case).split(":")[0] for case in range(12)]
    assert said[:4] == said[4:8] == said[8:] and plan.run(0) != plan.run(4)
    of_workers = [
        {plan.group(case) for case, _ in zip(cases_of(plan, worker, 3), range(9), strict=False)}
        for worker in range(3)
    ]
    assert not (of_workers[0] & of_workers[1]) and len(set().union(*of_workers)) == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counts.json"
    given = ["--seed", "2", "--models", "0", "--json", str(path)]
    assert main([*given, "--cases", "12"]) == 0
    assert "seed 2" in capsys.readouterr().out
    for start in ("5", "11"):  # These ran already, and count once.
        with pytest.raises(SystemExit, match="--start 12"):
            main([*given, "--cases", "12", "--start", start])
    assert main([*given, "--cases", "3", "--start", "12"]) == 0
    assert main([*given, "--cases", "3", "--seed", "3"]) == 0
    counts = json.loads(path.read_text())
    assert (counts["cases"], counts["findings"]) == (18, 0)
    assert [(run["start"], run["end"]) for run in counts["runs"]] == [(0, 12), (12, 15), (0, 3)]
    assert counts["runs"][0]["versions"]["torch"] in torch.__version__  # +cu132
    assert main(["--seconds", "0", "--models", "0"]) == 0
    assert main(["--seed", "2", "--only", "3", "--models", "0"]) == 0


@dataclass(frozen=True)
class Troubled(Plan):
    """Some of its cases end their process, lose its GPU, or never end."""

    def run(self, case: int) -> str:
        if case == 2:
            os._exit(7)
        if case == 4:
            time.sleep(600)
        if case in (5, 7):
            raise ValueError("misaligned address" if case == 7 else "wrong")
        return f"fine: {os.getpid()}"

    def is_lost(self) -> bool:
        return True


def test_a_process_that_is_lost_is_replaced(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(processes, "HUNG", 1.0)
    found = processes.run_in_processes(Troubled(1), 2, 1, 10, float("inf"))
    assert found.cases == 10 and found.end == 11 and found.names == {"fine": 6}
    said = sorted(found.failures)
    assert sorted(capsys.readouterr().out.splitlines()) == said and len(said) == 4
    for line, why in zip(said, ("the process died (exit code 7)", "took more than 1 s",
                                "ValueError: wrong", "misaligned"), strict=True):  # fmt: skip
        assert why in line, line


def test_processes_stop_in_time() -> None:
    found = processes.run_in_processes(Troubled(1), 1, 10, None, 0.0)
    assert found.cases == 0 and not found.failures


def test_several_processes_run_what_one_runs() -> None:
    plan = Plan(2, models=0.0)
    found = processes.run_in_processes(plan, 2, 3, 16, float("inf"))
    alone = run(plan, range(3, 19), echo=False)
    assert found.cases == alone.cases == 16 and found.end == alone.end == 19
    assert found.names == alone.names and not found.failures


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    replaced(monkeypatch, *OPS[4])
    assert main(["--seed", "2", "--cases", "60", "--models", "0"]) == 1
    said = capsys.readouterr().out
    assert "python -m tests.fuzz --seed 2 --only " in said and "failed" in said


def test_what_is_compared() -> None:
    ones = torch.ones(2, 3, dtype=torch.float64)
    assert close_to("x", ones.float(), ones, budget=1e-6) == 0.0
    for wrong in (ones * 1.1, ones * float("nan"), ones[:1]):
        with pytest.raises(Mismatch, match="x"):
            close_to("x", wrong, ones, budget=1e-6)
