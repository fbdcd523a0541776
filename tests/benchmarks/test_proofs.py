"""Accuracy, fusion and repeated runs on a CPU with toy sizes: what is checked and written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fidelity, proofs
from benchmarks.__main__ import main
from benchmarks.networks import GATE_ROWS, MICRO, Sizes, build_wan, setting
from benchmarks.runner import Plan, Shape, random_normal
from turbo_rcm_patch.bench import attention_fp64, errors_of, time_call
from turbo_rcm_patch.errors import ConfigError, DeviceError

CPU = torch.device("cpu")
MICRO_CPU = ["--micro", "--device", "cpu"]


def measured(command: str, out: Path, *more: str) -> tuple[int, Any]:
    code = main([command, *MICRO_CPU, *more, "--out", str(out)])
    return code, json.loads((out / f"{command}.json").read_text())


def test_accuracy_of_every_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = measured("ops", tmp_path / "deep")
    assert code == 0 and document["finished"]
    assert [name.split()[0] for name in document["cases"]] == ["random", "outliers"]
    for case in document["cases"].values():
        methods = case["methods"]
        assert len(methods) == 5 and "sageattention" not in methods
        errors = {name: one["error"]["relative_l2"] for name, one in methods.items()}
        assert errors["exact (torch SDPA)"] < errors["int8 bf16 PV"] < errors["int4 bf16 PV"]
    assert "cosine" in capsys.readouterr().out


def test_an_inaccurate_attention_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "INT8_LIMIT", 1e-4)
    code, document = measured("ops", tmp_path, "--peers", "int8 bf16 PV,int4 bf16 PV")
    random, outliers = (case["methods"] for case in document["cases"].values())
    assert code == 1 and random["int8 bf16 PV"]["status"] == "wrong"
    assert "reason" not in random["int4 bf16 PV"] and "reason" not in outliers["int8 bf16 PV"]


def test_a_method_that_raises_fails_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = proofs.ops.attention_skip

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        if args[3].attention == "int4":
            raise RuntimeError("no luck")
        return real(*args, **options)

    monkeypatch.setattr(proofs.ops, "attention_skip", broken)
    code, document = measured("ops", tmp_path, "--peers", "int4 bf16 PV,int8 bf16 PV")
    for case in document["cases"].values():
        assert "no luck" in case["methods"].pop("int4 bf16 PV")["reason"]
        assert "int8 bf16 PV" in case["methods"]
        assert all("reason" not in one for one in case["methods"].values())
    assert code == 1


def test_every_fused_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, document = measured("fusion", tmp_path)
    assert code == 0 and [name.split()[-1] for name in document["cases"]] == [
        "float32",
        "bfloat16",
    ]
    for case in document["cases"].values():
        assert len(case["methods"]) == 5
    for limit, value, words in (
        ("FUSION_LIMIT", -1.0, "fused to unfused"),
        ("FP64_RATIO", -1.0, "times the unfused error"),
        ("BF16_LIMIT", 0.0, "in bf16"),
    ):
        with monkeypatch.context() as one:
            one.setattr(proofs, limit, value)
            code, document = measured("fusion", tmp_path, "--peers", "in the attention")
        reasons = [case["methods"]["in the attention"].get("reason", "")
                   for case in document["cases"].values()]  # fmt: skip
        assert code == 1 and any(words in reason for reason in reasons), (limit, reasons)


def test_one_launch_is_repeated(tmp_path: Path) -> None:
    code, document = measured("one-launch", tmp_path)
    (case,) = document["cases"].values()
    found = case["methods"]["one-launch"]
    assert code == 0 and found["runs"] == found["runs_wanted"] == 3
    assert found["runs_that_differ"] == 0 and found["runs_launched_one_by_one"] == 3


def test_a_run_that_differs_is_counted_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))

    def flaky(shape: Shape, seed: int, device: torch.device) -> object:
        return lambda form: torch.full((2,), 1.0 + (next(calls) == 2), dtype=torch.bfloat16)

    monkeypatch.setattr(proofs, "_one_launch_call", flaky)
    code, document = measured("one-launch", tmp_path, "--calls", "5")
    (case,) = document["cases"].values()
    assert code == 1 and "1 of 5 runs" in case["methods"]["one-launch"]["reason"]


def test_one_launch_that_is_not_two_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "AGREEMENT", 0.0)
    assert measured("one-launch", tmp_path)[0] == 1


@pytest.mark.parametrize("command", ["ops", "fusion", "one-launch"])
def test_what_the_limit_cuts_is_said(command: str, tmp_path: Path) -> None:
    _, document = measured(command, tmp_path, "--limit", "0")
    assert document["left_out"] and not document["finished"]


def test_runs_that_the_limit_cuts_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_repeat", lambda call, first, most, deadline: (1, 1, 0))
    code, document = measured("one-launch", tmp_path)
    assert code == 1 and document["left_out"][0].startswith("2 runs at ")


def test_a_network_too_far_from_the_truth_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "NETWORK_LIMIT", 0.1)
    given = ["--only", "drawn-x1", "--peers", "precision fixed", "--calls", "1"]
    code, document = measured("fidelity", tmp_path, *given)
    methods = document["cases"]["drawn-x1"]["methods"]
    assert code == 1 and "reason" not in methods["unpatched"]
    assert "times the unpatched" in methods["precision fixed"]["reason"]


def test_what_the_guard_saw_is_kept(tmp_path: Path) -> None:
    given = ["--only", "drawn-x1", "--peers", "precision fixed", "--calls", "1"]
    code, document = measured("fidelity", tmp_path, *given)
    guard = document["cases"]["drawn-x1"]["methods"]["precision fixed"]["guard"]
    assert code == 0 and guard["pairs"] == 6 and guard["given_back"] == 0
    assert 0 < guard["worst_error"] < guard["budget"]


def test_memory_is_poisoned_only_inside() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with proofs.poisoned_memory():
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
    for make in (random_normal, proofs.outliers):
        one, again = make(shape, CPU, 0), make(shape, CPU, 0)
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    _, k, _ = proofs.outliers(shape, CPU, 0)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_no_gpu_is_a_typed_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceError, match="--micro"):
        Plan(out=tmp_path).torch_device()
    with pytest.raises(ConfigError, match="--inputs"):
        Plan(out=tmp_path, inputs=0)
    assert main(["ops", "--out", str(tmp_path)]) == 2
    assert "CUDA" in capsys.readouterr().err
