"""The comparisons on a CPU with toy sizes: what is checked, refused, written and drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, forward
from benchmarks.__main__ import main
from benchmarks.attention import AIMS, REFERENCE, attention_cases, attention_methods
from benchmarks.machine import ClockWatch, ceilings, exponential_ceiling
from benchmarks.measure import Timing, calls_within, reason_of
from benchmarks.networks import MICRO, build_wan, variants
from benchmarks.runner import Method, Plan, group_of, input_sets, rotating
from turbo_rcm_patch.errors import ConfigError

CPU = torch.device("cpu")
MICRO_CPU = ["--micro", "--device", "cpu", "--calls", "1"]
FEW = ["--peers", "ours bf16,torch flash"]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_sparse_is_checked_and_compared_with_dense(tmp_path: Path) -> None:
    assert main(["sparse", *MICRO_CPU, "--out", str(tmp_path)]) == 0
    (case,) = read(tmp_path / "sparse.json")["cases"].values()
    assert case["methods"]["dense int8"]["speed_up"] == 1.0
    for name in ("sparse auto", "sparse bf16"):
        found = case["methods"][name]
        assert found["status"] == "timed" and found["error"]["relative_l2"] < 0.02
        assert found["speed_up"] > 0


def test_attention_writes_tables_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attention", *MICRO_CPU, "--out", str(tmp_path)]) == 0
    screen = capsys.readouterr().out
    *_, before, line = screen.splitlines()
    assert "Paste" in before and "torch " in line
    assert all(f" | {name} " in line for name in attention_cases(micro=True))
    document = read(tmp_path / "attention.json")
    for key in ("command", "date", "machine", "versions", "code", "observed", "about"):
        assert document[key], key
    assert document["finished"] and not document["left_out"]
    assert document["command"].startswith("python -m benchmarks attention")
    assert list(document["cases"]) == list(attention_cases(micro=True))
    first = document["cases"]["H1-N40-D64"]
    ours = first["methods"]["ours bf16"]
    assert ours["status"] == "timed" and ours["error"]["relative_l2"] < 0.02
    assert set(ours["milliseconds"]) == set(ours["graph_milliseconds"])
    assert ours["milliseconds"]["p20"] <= ours["milliseconds"]["p80"]
    # On a CPU the operators of an emulation have no names by which to tell the attention.
    assert ours["tops"] > 0 and ours["kernel_milliseconds"] >= 0
    assert first["methods"]["torch flash"]["status"] == "timed"
    assert first["best_over_peer"]["torch flash"] > 0
    # What is not there is reported in words, on the screen and in the file.
    missing = first["methods"]["FlashAttention-3"]
    assert missing["status"] == "missing" and "flash_attn_interface" in missing["reason"]
    assert "flash_attn_interface" in screen
    # A case without peers has only ours and cuDNN.
    assert set(document["cases"]["H1-N64-D64"]["methods"]) == {*attention.OURS, "torch cuDNN"}
    for name in ("scaling", "accuracy", "roofline"):
        assert (tmp_path / f"attention_{name}.png").stat().st_size > 5_000


def zeros(inputs: Sequence[torch.Tensor]) -> Any:
    return lambda: torch.zeros_like(inputs[0])


def undefined(inputs: Sequence[torch.Tensor]) -> Any:
    real = attention_methods(1)[1].make(inputs)

    def call() -> torch.Tensor:
        out = real().clone()
        out[0, 1, 0] = float("nan")  # a row that the truth need not cover
        return out

    return call


def test_a_wrong_peer_is_reported_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = attention_methods

    def with_liars(heads: int) -> list[Method]:
        return [*real(heads), Method("liar", zeros), Method("undefined", undefined)]

    monkeypatch.setattr(attention, "attention_methods", with_liars)
    only = ["--only", "H1-N40-D64", "--peers", "ours bf16,liar,undefined"]
    assert main(["attention", *MICRO_CPU, *only, "--out", str(tmp_path)]) == 0
    methods = read(tmp_path / "attention.json")["cases"]["H1-N40-D64"]["methods"]
    for name in ("liar", "undefined"):
        assert methods[name]["status"] == "wrong"
        assert "milliseconds" not in methods[name] and "tops" not in methods[name]
    assert methods["liar"]["reason"] == "wrong (relL2 1)"
    assert "not finite" in methods["undefined"]["reason"]
    assert "wrong (relL2 1)" in capsys.readouterr().out


def test_ours_being_wrong_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attention_methods", lambda heads: [Method("ours fp8", zeros)])
    only = ["--only", "H1-N40-D64"]
    assert main(["attention", *MICRO_CPU, *only, "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("again", [2, 5], ids=["before it is timed", "while it is timed"])
@pytest.mark.parametrize(("name", "code"), [("ours fp8", 1), ("a peer", 0)])
def test_what_is_right_once_and_fails_later_is_missing(
    name: str, code: int, again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = attention_methods(1), []

    def fails_later(inputs: Sequence[torch.Tensor]) -> Any:
        run = next(method for method in real if method.name == "ours bf16").make(inputs)

        def call() -> torch.Tensor:
            calls.append(1)
            if len(calls) >= again:
                raise RuntimeError("no memory")
            return run()

        return call

    methods = [method for method in real if method.name == "ours bf16"]
    monkeypatch.setattr(
        attention, "attention_methods", lambda heads: [*methods, Method(name, fails_later)]
    )
    asked = ["--only", "H1-N40-D64", "--peers", f"ours bf16,{name}", "--out", str(tmp_path)]
    assert main(["attention", *MICRO_CPU, *asked]) == code
    found = read(tmp_path / "attention.json")["cases"]["H1-N40-D64"]["methods"]
    assert found["ours bf16"]["status"] == "timed"
    assert found[name]["status"] == "missing" and "no memory" in found[name]["reason"]


def test_an_interrupted_run_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, names = attention._case, []

    def case(one: Any, *args: Any, **options: Any) -> bool:
        names.append(one.shape.name)
        if len(names) == 2:
            raise KeyboardInterrupt
        return real(one, *args, **options)

    monkeypatch.setattr(attention, "_case", case)
    assert main(["attention", *MICRO_CPU, *FEW, "--out", str(tmp_path)]) == 130
    document = read(tmp_path / "attention.json")
    assert list(document["cases"]) == names[:1] and document["finished"] is False
    assert (tmp_path / "attention_scaling.png").is_file()
    # The plots can be drawn again from the file alone.
    (tmp_path / "attention_scaling.png").unlink()
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "attention_scaling.png").is_file()


@pytest.mark.parametrize("command", ["attention", "block", "network", "fidelity", "hbm"])
def test_the_limit_is_kept_and_what_it_cuts_is_said(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, *MICRO_CPU, "--limit", "0", "--out", str(tmp_path)])
    document = read(tmp_path / f"{command}.json")
    assert document["finished"] is (command == "hbm")  # on paper there is nothing to wait for
    assert bool(document["left_out"]) is (command != "hbm")
    assert ("left out" in capsys.readouterr().out) is (command != "hbm")


def test_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["network", *MICRO_CPU, "--only", "14b", "--out", str(tmp_path)]) == 0
    document = read(tmp_path / "network.json")
    assert list(document["cases"]) == ["14b"]
    for case in document["cases"].values():
        assert case["finite"] and case["equal_afterwards"]
        found = case["variants"]
        assert found["compiled sage"]["status"] == "missing"
        for name in ("eager", "compiled", "patched", "patched compiled"):
            assert found[name]["status"] == "timed"
            assert sum(found[name]["groups"].values()) > 0
        assert 0 < found["patched"]["error"]["relative_l2"] < forward.BROKEN
        assert case["comparison"]["16-bit linears"]["over"]["eager"] > 0
    assert (tmp_path / "network_forward.png").is_file()


def test_fidelity(tmp_path: Path) -> None:
    only = ["--only", "live-x8,cogvideox-2b", "--inputs", "2"]
    peers = "exact / residual model,exact / residual fp32,int8 / residual fp32"
    assert main(["fidelity", *MICRO_CPU, *only, "--peers", peers, "--out", str(tmp_path)]) == 0
    cases = read(tmp_path / "fidelity.json")["cases"]
    assert list(cases) == ["live-x8", "cogvideox-2b"]
    for case in cases.values():
        found = case["methods"]
        assert list(found) == ["unpatched", *peers.split(",")]
        assert all(one["status"] == "timed" for one in found.values())
        assert all(len(one["errors"]) == 2 for one in found.values())
        exact = found["exact / residual fp32"]
        assert exact["of_unpatched"] < found["exact / residual model"]["of_unpatched"]
        assert found["int8 / residual fp32"]["of_exact"] >= 0.95 and exact["of_exact"] == 1
    assert cases["live-x8"]["methods"]["int8 / residual fp32"]["of_exact"] > 1.05


def test_cogvideox(tmp_path: Path) -> None:
    only = ["--only", "cogvideox-5b", "--peers", "eager,compiled,eager sage,patched compiled"]
    assert main(["network", *MICRO_CPU, *only, "--out", str(tmp_path)]) == 0
    case = read(tmp_path / "network.json")["cases"]["cogvideox-5b"]
    assert case["finite"] and case["equal_afterwards"]
    assert case["config"]["use_rotary_positional_embeddings"]
    found = {name: one["status"] for name, one in case["variants"].items()}
    assert found.pop("eager sage") == "missing"
    assert set(found.values()) == {"timed"}
    assert 0 < case["variants"]["patched compiled"]["error"]["relative_l2"] < forward.BROKEN


def test_a_broken_network_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "BROKEN", 1e-9)
    few = ["--peers", "patched"]
    assert main(["network", *MICRO_CPU, *few, "--out", str(tmp_path)]) == 1
    patched = read(tmp_path / "network.json")["cases"]["1.3b"]["variants"]["patched"]
    assert patched["status"] == "wrong" and "milliseconds" not in patched


def test_a_large_network_is_made_in_bf16_and_keeps_what_must_be_fp32() -> None:
    narrow = build_wan(MICRO.network, CPU, 0, narrow=True)
    wide = build_wan(MICRO.network, CPU, 0)
    want = {name: p.dtype for name, p in wide.named_parameters()}
    assert {name: p.dtype for name, p in narrow.named_parameters()} == want
    assert torch.get_default_dtype() == torch.float32
    for (_, one), (_, other) in zip(narrow.named_buffers(), wide.named_buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant.name)
def test_a_variant_leaves_the_network_as_it_was(variant: Any) -> None:
    network = build_wan(MICRO.network, CPU, 0)
    before = [dict(vars(module)) for module in network.modules()]
    try:
        with variant.enter(network, "eager"):
            pass
    except ImportError:
        assert "sage" in variant.name
    after = [dict(vars(module)) for module in network.modules()]
    for one, other in zip(before, after, strict=True):
        other.pop("_compiled_call_impl", None), one.pop("_compiled_call_impl", None)
        assert one == other
    assert all(block._compiled_call_impl is None for block in network.blocks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attention", "--only", "H1-N1-D1"], "H1-N40-D64"),
        (["attention", "--peers", "ours fp4"], "torch cuDNN"),
        (["block", "--only", "cogvideo"], "wan"),
        (["network", "--only", "7b"], "14b"),
        (["network", "--only", "turbo-1.3b,1.3b", "--peers", "patched SageSLA"], "eager"),
        (["hbm", "--peers", "three-pass"], "two-launch"),
        (["attention", "--calls", "0"], "--calls"),
        (["attention", "--limit", "-1"], "--limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_bad_arguments_are_typed_errors(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [arguments[0], "--micro", "--device", "cpu", "--out", str(tmp_path), *arguments[1:]]
    assert main(given) == 2
    assert words in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_bad_places_are_typed_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a folder"):
        Plan(out=tmp_path / "file")
    with pytest.raises(ConfigError, match="--micro"):
        Plan(out=tmp_path, device="cpu").torch_device()
    assert main(["plot", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["attention", "--micro", "--device", "cpu"], "attention.json"),
        (["attention", "--micro", "--device", "cpu"], "attention_scaling.png"),
        (["cards"], "cards.json"),
        (["parallel", "--paper"], "parallel_table.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_somebodys_files_are_not_written_over(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, '{"mine": 1}')]


def test_a_place_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "new")
    assert main(["attention", "--micro", "--device", "cpu", "--out", out]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_aims_name_cases_and_methods_that_exist() -> None:
    cases = attention_cases(micro=False)
    assert set(AIMS) == set(REFERENCE) <= set(cases)
    names = {method.name for method in attention_methods(1)}
    assert {peer for peer, _ in AIMS.values()} <= names
    assert cases["H12-N4096-D128"].operations == 4 * 4096**2 * 1536
    assert cases["H12-N4096-D128"].intensity == 4096 / 2


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("attention_kernel", "attention"),
        ("hopper_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("prologue_kernel", "prologue"),
        ("nvjet_sm90_tst_256x152_64x4_1x2_h_bz_coopA_gelubias_TNT", "GEMM"),
        ("statistics_kernel", "prologue"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_bias_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("project_kernel", "GEMM"),
        ("triton_red_fused__to_copy_add_mul_native_layer_norm_0", "norm and modulate"),
        ("triton_poi_fused_gelu_3", "activation"),
        ("skip_kernel", "skip"),
        ("void at::native::vectorized_elementwise_kernel<4, add>", "elementwise and copies"),
        ("Memcpy DtoD (Device -> Device)", "elementwise and copies"),
        ("something", "other"),
    ],
)
def test_kernels_are_grouped_by_name(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_clock_helpers() -> None:
    assert Timing.of([3.0, 1.0, 2.0, 9.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5)
    turns = rotating([lambda: torch.tensor(0), lambda: torch.tensor(1)])
    assert [int(turns()) for _ in range(4)] == [0, 1, 0, 1]
    assert input_sets(2**30) == 2 and input_sets(1) == input_sets(0) > 2
    assert calls_within(lambda: None, CPU, 1e9, 2, 7) == 7
    assert calls_within(lambda: None, CPU, 0.0, 2, 7) == 2
    assert reason_of(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert reason_of(ValueError()) == "ValueError: no message"


def test_a_cpu_has_no_clock_and_no_data_sheet() -> None:
    watch = ClockWatch(CPU)
    assert watch.since(0.0) == {"sm_clock_mhz": "unknown"}
    watch.stop()
    assert ceilings(CPU) == {} and exponential_ceiling(CPU, 128, 1500.0) is None


def test_time_over_length_has_a_row_for_every_method(tmp_path: Path) -> None:
    # That CogVideoX compiles is test_cogvideox's.
    plain = [name for name in forward.METHODS if "compiled" not in name]
    for rows, peers in (
        ({"780": 16}, list(forward.METHODS)),
        ({"780": 16, "cogvideox-2b": 57}, plain),
    ):
        out = tmp_path / f"{len(rows)}"
        asked = [] if len(rows) == 1 else ["--peers", ",".join(peers)]
        asked += ["--only", ",".join(rows), "--out", str(out)]
        assert main(["length", *MICRO_CPU, *asked]) == 0
        cases = read(out / "length.json")["cases"]
        assert {name: case["tokens"] for name, case in cases.items()} == rows
        for case in cases.values():
            methods = case["methods"]
            assert list(methods) == peers
            assert methods["eager sage"]["status"] == "missing", "no CUDA build on a CPU"
            for name, found in methods.items():
                if name == "eager sage":
                    continue
                assert found["status"] == "timed", (name, found)
                assert found["cpu_milliseconds"]["median"] > 0
            assert methods["patched"]["in_int8"] == 1.0
            assert methods["patched exact"]["in_int8"] == 0.0
            assert methods["patched exact"]["error"]["relative_l2"] < 0.02
    assert (out / "time_over_length.png").stat().st_size > 10_000


def test_results_become_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def timed(ms: float, cpu: float, **more: object) -> dict[str, object]:
        return {"milliseconds": {"median": ms}, "cpu_milliseconds": {"median": cpu}, **more}

    cases = {
        "780": {"tokens": 780, "methods": {
            "eager": timed(32.7, 32.4), "patched": timed(21.25, 20.8, in_int8=0.0),
            "eager sage": {"status": "missing", "reason": "no such package"},
        }},
        "cogvideox-2b": {"tokens": 17776, "methods": {
            "eager": timed(314.0, 120.0), "patched": timed(203.4, 26.0, in_int8=1.0),
            "compiled": timed(262.0, 15.0),
        }},
        "WanModel": {"status": "missing", "reason": "no checkout"},
    }  # fmt: skip
    (tmp_path / "length.json").write_text(json.dumps({"cases": cases}))
    seconds = {"cold_seconds": 9.5, "warm_seconds": 4.5, "denoise_seconds": 1.48,
               "decode_seconds": 3.05, "peak_bytes": 2**34}  # fmt: skip
    video = {"rcm-4-steps": {"methods": {"patched": seconds, "compiled": {"reason": "no"}}}}
    (tmp_path / "video.json").write_text(json.dumps({"cases": video}))
    assert main(["table", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split("\n\n") == [
        "|  | tokens | eager | `torch.compile` | **patched** | in int8 |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| Wan2.1-1.3B | 780 | 32.7 (32.4) |  | 21.2 (20.8) | 0% |\n"
        "| CogVideoX-2B | 17,776 | 314 (120) | 262 | 203 | 100% |",
        "|  |  | first video | next | in the sampler | in the VAE | peak, GiB |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| rcm-4-steps | patched | 9.50 | 4.50 | 1.48 | 3.05 | 16.0 |\n",
    ]
    assert main(["table", str(tmp_path / "nothing")]) == 2


def test_seconds_a_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "guidance-30-steps", "--peers", "eager,patched"]
    assert main(["video", *MICRO_CPU, *only, "--out", str(tmp_path)]) == 0
    (case,) = read(tmp_path / "video.json")["cases"].values()
    assert case["settings"]["steps"] == 2 and case["settings"]["guidance_scale"] == 5.0
    for record in case["methods"].values():
        assert record["status"] == "timed"
        both = record["denoise_seconds"] + record["decode_seconds"]
        assert both == pytest.approx(record["warm_seconds"])
    patched = case["methods"]["patched"]
    assert patched["fused"] == patched["pairs"] > 0
    assert "patched" in capsys.readouterr().out


def test_a_video_that_is_not_finite_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.video.decode_latents", lambda *args: torch.full((1,), float("nan"))
    )
    only = ["--only", "rcm-4-steps", "--peers", "patched"]
    assert main(["video", *MICRO_CPU, *only, "--out", str(tmp_path)]) == 1
