"""The proof-recording command, on a CPU with toy sizes: its plumbing, not its numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import record as recording
from benchmarks.__main__ import main
from benchmarks.networks import GATE_ROWS, MICRO, Sizes, build_wan, setting
from benchmarks.record import PARTS, Options, Result, format_table, record
from benchmarks.runner import Deadline, Shape, random_normal
from turbo_rcm_patch.bench import attention_fp64, errors_of, time_call
from turbo_rcm_patch.errors import ConfigError, DeviceError

CPU = torch.device("cpu")
MICRO_CPU = ["record", "--micro", "--device", "cpu", "--quick", "--repeats", "3"]


def test_records_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "cpu.json"
    code = main([*MICRO_CPU, "--forwards", "1", "--out", str(out)])
    screen = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert code == 0, screen
    assert list(document["parts"]) == list(PARTS)
    assert document["passed"] is True
    for key in ("command", "date", "machine", "versions", "code", "options", "seconds"):
        assert document[key]
    network = document["parts"]["network"]
    assert network["forward"]["equal_after_unpatching"] is True
    assert network["forward"]["int8"]["fused_pairs"] > 0
    assert [one["pairs"] for one in network["guard"]] == [6, 6, 6, 6]
    assert len(network["network_number"]) == 8  # four settings at two sizes
    assert document["parts"]["one-launch"]["table"][0]["runs"] == 3
    for word in ("cosine", "fused to unfused", "runs that differ", "patched / unpatched"):
        assert word in screen


def test_a_failing_part_is_recorded_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: Options, result: Result) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(recording, "accuracy", broken)
    out = tmp_path / "cpu.json"
    assert main([*MICRO_CPU, "--only", "ops,one-launch", "--out", str(out)]) == 1
    document = json.loads(out.read_text())
    assert document["passed"] is False
    assert "no luck" in document["parts"]["ops"]["error"]
    assert document["parts"]["one-launch"]["passed"] is True
    assert "FAILED: RuntimeError: no luck" in capsys.readouterr().out


def test_an_interrupted_run_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: Options, result: Result) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "accuracy", interrupted)
    out = tmp_path / "cpu.json"
    assert main([*MICRO_CPU, "--only", "one-launch,ops", "--out", str(out)]) == 130
    document = json.loads(out.read_text())
    assert list(document["parts"]) == ["one-launch"]
    assert document["passed"] is False


def test_what_the_deadline_cuts_is_said_and_fails(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    options = Options(sizes=MICRO, device="cpu", repeats=2, limit=0.0)
    assert record(options, ["ops", "one-launch", "fusion"], out, "test") == 1
    parts = json.loads(out.read_text())["parts"]
    assert parts["ops"]["left_out"] and parts["one-launch"]["left_out"]
    assert parts["fusion"]["left_out"]


def test_a_run_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def flaky(shape: Shape, options: Options, device: torch.device) -> object:
        return lambda form: torch.full((2,), 1.0 + (next(calls) == 2), dtype=torch.bfloat16)

    monkeypatch.setattr(recording, "_one_launch_call", flaky)
    result = Result(Deadline(60))
    recording.one_launch(Options(sizes=MICRO, device="cpu", repeats=5), result)
    assert result.rows[0][2] == "1"
    assert any("1 of 5 runs" in failure for failure in result.failures)


def test_memory_is_poisoned_only_inside() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with recording.poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.zeros(1).new_empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int8) == -128).all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.float16)).isnan().all()
    assert (torch.empty, torch.Tensor.new_empty) == before


def test_truth_of_the_accuracy_table() -> None:
    q, k, v = (torch.randn(2, n, 32, dtype=torch.float64) for n in (5, 7, 7))
    heads = [x.view(2, -1, 2, 16).transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention_fp64(q, k, v, 2), want)


def test_outliers_are_harder_than_random_inputs() -> None:
    shape = Shape(1, 64, 64, 1, 64)
    for make in (random_normal, recording.outliers):
        one, again = make(shape, CPU, 0), make(shape, CPU, 0)
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    _, k, _ = recording.outliers(shape, CPU, 0)
    assert k.float().abs().max() > 8


def test_errors_of_a_known_difference() -> None:
    numbers = errors_of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert numbers["relative_l2"] == pytest.approx(math.sqrt(0.5))
    assert numbers["relative_l1"] == pytest.approx(0.5)
    assert numbers["rmse"] == pytest.approx(math.sqrt(0.5))
    assert numbers["cosine"] == pytest.approx(3 / math.sqrt(10))


def test_timing_counts_calls() -> None:
    calls: list[int] = []
    timing = time_call(lambda: calls.append(1), CPU, calls=5, warmup=2)
    assert len(calls) == 7 and timing.calls == 5
    assert timing.p20 <= timing.median <= timing.p80


def test_network_is_kept_in_fp32_where_from_pretrained_keeps_it(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    network = build_wan(MICRO.network, CPU, 0)
    network.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    want = {name: p.dtype for name, p in loaded.named_parameters()}
    assert {name: p.dtype for name, p in network.named_parameters()} == want
    again = build_wan(MICRO.network, CPU, 0)
    assert all(
        torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters(), strict=True)
    )


def test_settings_change_the_weights_and_give_them_back() -> None:
    network = build_wan(MICRO.network, CPU, 0)
    before = {name: p.clone() for name, p in network.named_parameters()}
    block = network.blocks[0]
    with setting(network, live=True, sharp=True):
        table = block.scale_shift_table - before["blocks.0.scale_shift_table"]
        assert torch.allclose(table[:, GATE_ROWS], torch.tensor(0.3))
        assert table.abs().sum(-1).count_nonzero() == 2
        assert torch.equal(block.attn1.norm_q.weight, 8 * before["blocks.0.attn1.norm_q.weight"])
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())


def test_default_sizes_are_those_of_wan() -> None:
    sizes = Sizes()
    frames, height, width = sizes.latents[2:]
    assert frames * (height // 2) * (width // 2) == 32_760
    assert sizes.network["num_layers"] == 30


def test_table_lines_up() -> None:
    lines = format_table(("name", "value"), [("a", "1.5"), ("long name", "10.25")]).splitlines()
    assert lines[2].endswith("  1.5") and lines[3].endswith("10.25")
    assert len({len(line) for line in lines[1:]}) == 1


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x.json")]
    assert main([*MICRO_CPU, "--only", "speed", *out]) == 2
    assert "one-launch" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="times"):
        Options(times=4)
    with pytest.raises(ConfigError, match="repeats"):
        Options(repeats=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_no_gpu_is_a_typed_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceError, match="--micro"):
        Options().torch_device()
    assert main(["record", "--out", str(tmp_path / "x.json")]) == 2
    assert "CUDA" in capsys.readouterr().err


def test_somebodys_file_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    for text in ("notes", "[1]", '{"parts": 3}'):
        out.write_text(text)
        assert main([*MICRO_CPU, "--out", str(out)]) == 2
        assert "`record` did not write it" in capsys.readouterr().err
        assert out.read_text() == text
