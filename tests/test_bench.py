"""`bench`: what is right is timed and told in one line, what is wrong is told and not timed."""

from __future__ import annotations

import pytest
import torch

from turbo_rcm_patch import bench
from turbo_rcm_patch.__main__ import main

MICRO = ["bench", "--micro", "--device", "cpu", "--calls", "1"]


def test_the_last_line_can_be_pasted_into_an_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MICRO) == 0
    *_, before, line = capsys.readouterr().out.splitlines()
    assert "Paste" in before
    assert f"torch {torch.__version__}" in line and "turbo_rcm_patch" in line
    for name in ("H1-N40-D64", "H2-N96-D64"):
        (found,) = (part for part in line.split(" | ") if part.startswith(name))
        assert " ms " in found and float(found.split("relL2 ")[1]) < 0.02


@pytest.mark.parametrize("row", [0, 1], ids=["checked", "not checked"])
def test_a_wrong_output_is_not_timed(
    row: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.ops.attention_skip

    def wrong(*args: object) -> torch.Tensor:
        out = real(*args).clone()  # type: ignore[arg-type]
        out[0, row] = float("nan")
        return out

    monkeypatch.setattr(bench.ops, "attention_skip", wrong)
    monkeypatch.setattr(bench, "some_rows", lambda *_: torch.tensor([0]))
    assert main(MICRO) == 1
    said = capsys.readouterr().out
    assert (
        said.count("not timed") == 2 and "WRONG" in said.splitlines()[-1] and " ms 0" not in said
    )


def test_a_kernel_that_fails_does_not_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.ops.attention_skip

    def failing(q: torch.Tensor, *args: object) -> torch.Tensor:
        if q.shape[1] == 40:
            raise RuntimeError("out of resource: shared memory\nmore")
        return real(q, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.ops, "attention_skip", failing)
    assert main(MICRO) == 1
    *_, line = capsys.readouterr().out.splitlines()
    assert "H1-N40-D64 FAILED (RuntimeError: out of resource: shared memory)" in line
    assert "H2-N96-D64" in line and "relL2" in line


@pytest.mark.parametrize("name", ["banana", "mps", "meta", "cuda:7", "cuda:x"])
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_device_that_is_not_there_is_a_mistake_in_the_arguments(
    command: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main([command, "--micro", "--device", name]) == 2
    said = capsys.readouterr().err
    assert "--device" in said and name in said and "cuda" in said


def test_real_sizes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu"]) == 2
    assert "--micro" in capsys.readouterr().err
    assert main([*MICRO[:4], "--calls", "0"]) == 2
    assert "--calls" in capsys.readouterr().err
