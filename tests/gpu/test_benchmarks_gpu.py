"""The comparisons on a GPU with toy sizes: events, graphs, profiler and tiles really used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from turbo_rcm_patch.kernels.tile_table import VARIABLE, read_table

from benchmarks.__main__ import main
from benchmarks.runner import graph_of, kernel_milliseconds, rotating
from turbo_rcm_patch.__main__ import main as command
from turbo_rcm_patch.kernels.launch import forget_tiles

pytestmark = pytest.mark.gpu

MICRO = ["--micro", "--calls", "2"]


@pytest.mark.parametrize("command", ["attention", "block", "network"])
def test_comparison(command: str, tmp_path: Path) -> None:
    assert main([command, *MICRO, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / f"{command}.json").read_text())
    assert document["finished"] and list(tmp_path.glob("*.png"))
    assert document["machine"]["device"] == torch.cuda.get_device_name()


def test_linear(tmp_path: Path) -> None:
    assert main(["linear", *MICRO, "--out", str(tmp_path)]) == 0
    (case,) = json.loads((tmp_path / "linear.json").read_text())["cases"].values()
    assert {one["status"] for one in case["methods"].values()} == {"timed"}


def test_sparse_linear_networks(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """With `--turbodiffusion PATH` its own class and its own kernel too."""
    path = pytestconfig.getoption("--turbodiffusion")
    given = ["--only", "turbo-1.3b", *(["--turbodiffusion", path] if path else [])]
    assert main(["network", *MICRO, *given, "--out", str(tmp_path)]) == 0
    cases = json.loads((tmp_path / "network_turbo.json").read_text())["cases"]
    found = cases["diffusers"]["variants"]
    assert {one["status"] for one in found.values()} == {"timed"}
    if path:
        found = cases["WanModel"]["variants"]
        assert found["eager SLA"]["status"] == "timed"
        assert found["eager SLA"]["error"]["relative_l2"] < 0.02


def test_attention_times_graphs_and_kernels(tmp_path: Path) -> None:
    given = ["--only", "H1-N40-D64", "--peers", "ours bf16,torch flash", "--out", str(tmp_path)]
    assert main(["attention", *MICRO, *given]) == 0
    methods = json.loads((tmp_path / "attention.json").read_text())["cases"]["H1-N40-D64"]
    ours = methods["methods"]["ours bf16"]
    assert 0 < ours["kernel_milliseconds"] < ours["milliseconds"]["median"]
    # Without the launches a few tokens take less time.
    assert ours["graph_milliseconds"]["median"] < ours["milliseconds"]["median"]


def test_bench_checks_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["bench", *MICRO]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert torch.cuda.get_device_name() in line and "H1-N40-D64" in line


def test_a_tuned_table_is_read_by_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tiles.json"
    assert command(["tune", *MICRO, "--only", "skip", "--out", str(out)]) == 0
    read_table(out)
    monkeypatch.setenv(VARIABLE, str(out))
    forget_tiles()
    try:
        given = ["--only", "H1-N40-D64", "--peers", "ours bf16"]
        assert main(["attention", *MICRO, *given, "--out", str(tmp_path / "b")]) == 0
    finally:
        monkeypatch.delenv(VARIABLE)
        forget_tiles()


def test_a_graph_replays_every_call() -> None:
    x = [torch.full((1024,), float(i), device="cuda") for i in range(3)]
    y = [torch.zeros_like(one) for one in x]
    calls = [lambda i=i: y[i].copy_(x[i]) for i in range(3)]
    replay = graph_of(calls)
    for one in y:
        one.zero_()
    replay()
    assert [float(one[0]) for one in y] == [0.0, 1.0, 2.0]
    assert sum(kernel_milliseconds(rotating(calls), torch.device("cuda")).values()) > 0
