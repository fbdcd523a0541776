"""The comparison from noise to report: complete, resumable, and without a trace in the model."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from peft import LoraConfig

from tests.measures import relative_l2
from tests.video.micro import SMALL, micro_pipe, save
from turbo_rcm_patch import PatchConfig, is_patched, patched
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    ConfigError,
    OutputExistsError,
    SamplingError,
)
from turbo_rcm_patch.files import lock_folder
from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS
from turbo_rcm_patch.video import comparison, environment, generate
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.measures import (
    CapturedCalls,
    network_number,
    upcast,
)
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.store import Store
from turbo_rcm_patch.video.video import read_frames

PROMPTS = ["a red circle moves left", "a blue square moves up"]
RED = PROMPTS[0]
ONE_STEP = Settings(sampler="rcm", steps=1, guidance_scale=1.0, **SMALL)


@pytest.fixture(scope="module")
def finished(pipe, settings, tmp_path_factory: pytest.TempPathFactory):
    """One comparison, looked at by many tests."""
    return compare(pipe, PROMPTS, out=tmp_path_factory.mktemp("compare"), settings=settings)


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest) -> None:
    """Only those of `finished` are looked at, which a test without a folder of its own has."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("no_pictures")


def quick(pipe: Any, out: Path, prompts: Any = RED, **given: Any) -> Any:
    """Compare one step without the network number, unless something else is given."""
    return compare(
        pipe, prompts, out=out, **{"settings": ONE_STEP, "network_number": False} | given
    )


def hidden(out: Path) -> list[Path]:
    return [path for path in out.rglob(".*") if path.is_file()]


def written(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("prompts/*/*")}


def state(pipe) -> object:
    """Everything that a comparison could change: the network, its backends, torch's flags."""
    cuda, network = torch.backends.cuda, pipe.transformer
    return (
        {name: sorted(module.__dict__) for name, module in network.named_modules()},
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()],
        {n: float(p.detach().double().sum()) for n, p in network.named_parameters()},
        [getattr(m.processor, "_attention_backend", None)
         for m in network.modules() if hasattr(m, "processor")],
        _AttentionBackendRegistry.get_active_backend(),
        list(AttentionBackendName.__members__),
        cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
        torch.nn.functional.scaled_dot_product_attention, torch.get_default_dtype(),
        torch.random.get_rng_state().tolist(), torch.is_grad_enabled(),
    )  # fmt: skip


@pytest.mark.supports("WanTransformer3DModel", "compare")
def test_everything_is_written(finished, settings: Settings) -> None:
    out, page = finished.out, finished.report.read_text()
    for clip in finished.results:
        folder = out / "prompts" / clip.key
        videos = {path.name: np.stack(read_frames(path)) for path in folder.glob("*.mp4")}
        assert {*videos} == {"side_by_side.mp4", "panes.mp4"}
        assert {len(frames) for frames in videos.values()} == {settings.num_frames}
        assert videos["side_by_side.mp4"].shape[1] >= 256, "small videos are enlarged to be seen"
    links = re.findall(r'<a href="([^"]*)"', page)
    assert len(links) == 2 and all((out / link).is_file() for link in links)
    assert hidden(out) == [] and not list(out.glob("clips/*")), "frames go once they are measured"
    assert str(out / "report.html") in str(finished)
    assert str(out) not in page and finished.model.identity["model"] not in page

    metrics = json.loads(finished.metrics.read_text(), parse_constant=pytest.fail)
    assert (metrics["schema"], metrics["verdict"]) == (1, finished.verdict)
    passed = [check["passed"] for check in metrics["checks"]]
    assert passed.count(False) == len(finished.judgement.reasons)
    for numbers, prompt in zip(metrics["prompts"], PROMPTS, strict=True):
        assert numbers["prompt"] == prompt
        for run in ("patched", "control"):
            assert len(numbers[run]["frame_psnr"]) == settings.num_frames
            assert numbers[run]["worst_psnr"] == min(numbers[run]["frame_psnr"])
    for run in ("baseline", "patched"):
        assert metrics["times"][run]["first_call_seconds"] > 0
        assert metrics["times"][run]["median_seconds"] > 0
        assert metrics["times"][run]["decode_seconds"] > 0
    assert {"torch", "diffusers", "triton", "python"} <= metrics["identity"]["versions"].keys()
    assert metrics["identity"]["config"]["attention"] == "auto"
    assert metrics["identity"]["settings"]["steps"] == settings.steps
    assert metrics["patch"]["impl"] == "reference" and metrics["patch"]["guard"]
    assert metrics["network"]["ratio"] == pytest.approx(finished.model.network.ratio)
    assert metrics["fusion"]["fused_vs_unfused"] <= 3e-6
    assert metrics["control_backend"] == "math" and metrics["attention_backend"] is None


def test_a_new_start_on_request_only(pipe, tmp_path: Path) -> None:
    quick(pipe, tmp_path)
    before = written(tmp_path)
    for other in (
        {"steps": 2}, {"config": PatchConfig(guard=False)}, {"attention_backend": "_native_math"}
    ):  # fmt: skip
        with pytest.raises(SamplingError, match=r"same (settings|config|att).*`fresh=True`"):
            quick(pipe, tmp_path, **other)
    assert before.items() <= written(tmp_path).items()
    quick(pipe, tmp_path, steps=2, fresh=True)
    assert not before.items() & written(tmp_path).items()


@pytest.mark.parametrize("stage", ["baseline", "patched", "control", "network", "videos"])
def test_an_interruption_leaves_nothing_half_done(
    pipe, settings, finished, tmp_path: Path, stage: str
) -> None:
    before = state(pipe)

    def stop(what: str, done: int, total: int) -> None:
        # Of the network's 3 x 2 calls the last are those in fp32.
        if what == stage and done > (4 if stage == "network" else 0):
            raise KeyboardInterrupt

    given = {"settings": settings, "network_number": stage == "network"}
    with pytest.raises(KeyboardInterrupt):
        quick(pipe, tmp_path, PROMPTS, progress=stop, **given)
    assert state(pipe) == before
    assert hidden(tmp_path) == []
    assert not (tmp_path / "report.html").exists()
    resumed = quick(pipe, tmp_path, PROMPTS, **given)
    for clip, other in zip(resumed.results, finished.results, strict=False):
        assert (clip.patched, clip.control) == (other.patched, other.control), "the same numbers"
    assert resumed.model.patch_report
    assert state(pipe) == before


def test_bad_input_is_refused(micro_folder, pipe, tmp_path: Path) -> None:
    for prompts in ([], [" "]):
        with pytest.raises(SamplingError, match="none of them empty"):
            quick(pipe, tmp_path, prompts)
    for name, value in (("seed", 2**64 - 1), ("no_such_setting", 3), ("sampler", "none")):
        with pytest.raises(ConfigError, match=name):
            quick(pipe, tmp_path, PROMPTS, **{name: value})
    with patched(pipe.transformer), pytest.raises(AlreadyPatchedError):
        quick(pipe, tmp_path)
    broken = load_pipeline(micro_folder, device="cpu")
    broken.transformer.proj_out.bias.data.fill_(float("nan"))
    with pytest.raises(SamplingError, match="NaN"):
        quick(broken, tmp_path)
    with lock_folder(tmp_path), pytest.raises(OutputExistsError, match="in use by another run"):
        quick(pipe, tmp_path, fresh=True)


def test_a_patched_video_with_nan_is_changed(pipe, tmp_path: Path, monkeypatch) -> None:
    bias = pipe.transformer.proj_out.bias
    sound, seeds = bias.detach().clone(), set()

    def generated(pipe: Any, *given: Any, **named: Any) -> Any:
        seeds.add(named["seed"])
        bias.data.copy_(sound * math.nan if is_patched(pipe) else sound)
        return generate(pipe, *given, **named)

    monkeypatch.setattr(comparison, "generate", generated)
    found = quick(pipe, tmp_path, PROMPTS, seed=7)
    assert found.verdict == "changed" and math.isnan(found.results[0].patched.psnr)
    assert seeds == {7, 8}


# --- the control ---------------------------------------------------------------------------------


def test_the_control_is_the_first_exact_backend_that_differs(pipe, tmp_path, monkeypatch) -> None:
    """On a CPU the native backend is flash, so flash as the control changes nothing."""
    monkeypatch.setattr(comparison, "candidates", lambda _: ("flash", "cudnn"))
    refused = "flash is bit-equal to the baseline; cudnn cannot run this model"
    with pytest.raises(SamplingError, match=refused):
        quick(pipe, tmp_path)
    monkeypatch.setattr(comparison, "candidates", lambda _: ("flash", "cudnn", "math"))
    assert quick(pipe, tmp_path).model.control_backend == "math"


def test_the_control_changes_the_networks_attention_alone(pipe, tmp_path: Path) -> None:
    """The text encoder and the VAE run as they do for the baseline."""
    allowed: dict[torch.nn.Module, set[bool]] = defaultdict(set)
    parts = (pipe.transformer.blocks[0], pipe.vae.decoder, pipe.text_encoder)
    with ExitStack() as hooks:
        for part in parts:
            hook = part.register_forward_pre_hook(
                lambda part, _: allowed[part].add(torch.backends.cuda.flash_sdp_enabled())
            )
            hooks.enter_context(hook)
        quick(pipe, tmp_path)
    assert [allowed[part] for part in parts] == [{True, False}, {True}, {True}]


def test_a_fault_of_the_device_is_no_missing_backend(pipe, tmp_path: Path, monkeypatch) -> None:
    def faulty(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal access\nCUDA kernel errors might be late")

    monkeypatch.setattr(comparison, "sdpa_kernel", faulty)
    with pytest.raises(RuntimeError, match="illegal access"):
        quick(pipe, tmp_path)


# --- another attention backend -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["_native_math", "turbo_rcm_int8"])
def test_any_backend_of_diffusers_is_judged(pipe, tmp_path: Path, backend: str) -> None:
    before = state(pipe)
    # 1,024 tokens, from which this package's backend is int8.
    size = {"height": 128, "width": 256} if backend == "turbo_rcm_int8" else {}
    found = quick(pipe, tmp_path, attention_backend=backend, network_number=True, **size)
    assert state(pipe) == before
    assert found.verdict == "unchanged"
    assert 40 < found.results[0].patched.psnr < math.inf, "the backend computed it"
    model = found.model
    assert model.network is not None and model.network.patched != model.network.unpatched
    assert model.fusion is None and model.patch == {}
    assert backend in str(found) and backend in found.metrics.read_text()
    assert f"{backend} \\u2212 baseline" in found.report.read_text()


def test_a_backend_of_16_bits_alone_is_judged(
    micro_folder: Path, monkeypatch, tmp_path: Path
) -> None:
    """As sageattention is one, though a Wan in bf16 keeps some parameters in fp32."""
    pipe = load_pipeline(micro_folder, device="cpu", dtype=torch.bfloat16)
    name = AttentionBackendName._NATIVE_MATH
    original = _AttentionBackendRegistry._backends[name]

    def of_16_bits(query: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        assert query.dtype in (torch.bfloat16, torch.float16)
        return original(query, *inputs, **named)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, name, of_16_bits)
    found = quick(pipe, tmp_path, attention_backend=name.value, network_number=True)
    assert found.model.network is not None and found.verdict == "unchanged"


def test_a_backend_that_ran_nothing_in_int8_is_not_judged(pipe, tmp_path: Path) -> None:
    """Of 64 tokens, where it is exact; under guidance each block runs twice a step."""
    guided: dict[str, Any] = {"sampler": "scheduler", "guidance_scale": 4.0}
    found = quick(pipe, tmp_path, attention_backend="turbo_rcm_int8", **guided)
    assert found.verdict == "not judged" and "few tokens" in str(found.judgement.ran)
    assert sorted(found.judgement.ran.calls) == ["blocks.0", "blocks.1"]
    assert json.loads(found.metrics.read_text())["ran"]["share_as_asked"] == 0


def test_what_the_guard_made_exact_is_not_judged(pipe, tmp_path: Path) -> None:
    """int4 with the guard on: the videos are those of exact attention, and no verdict on int4."""
    given: dict[str, Any] = {"steps": 3, "config": PatchConfig(attention="int4")}
    found = quick(pipe, tmp_path, **given)
    ran = found.judgement.ran
    assert found.verdict == "not judged" and ran.share == 0
    assert "verdict: not judged, over 1 prompt\n" in str(found)
    assert "  All 2 blocks ran exact attention" in str(found)
    assert [len(steps) for steps in ran.calls.values()] == [3, 3]
    assert json.loads(found.metrics.read_text())["ran"]["part"] == ["length", "wide-values"]
    again = quick(pipe, tmp_path, PROMPTS, **given)
    assert ran.forms.total() == 6 and again.judgement.ran.forms.total() == 12, "kept, and more"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("no_such_backend", "no_such_backend"),
        ("_flash_3", "missing package"),
        ("_native_cudnn", "RuntimeError"),
        ("_native_npu", "missing package"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_names(
    pipe, tmp_path: Path, backend: str, said: str
) -> None:
    before = state(pipe)
    with pytest.raises(ConfigError, match=said) as caught:
        quick(pipe, tmp_path / "out", attention_backend=backend)
    for name in ("sage", "flash", "native", "turbo_rcm_int8"):
        assert name in caught.value.expected
    assert state(pipe) == before and not (tmp_path / "out").exists()


def test_a_backend_is_refused_where_it_would_change_nothing(pipe, tmp_path: Path) -> None:
    config = PatchConfig(attention="int4", guard=False)
    with pytest.raises(ConfigError, match="attention, guard"):
        quick(pipe, tmp_path, config=config, attention_backend="native")
    with pytest.raises(ConfigError, match="asks for no backend"):
        tiny = load_pipeline("tiny-cogvideox", device="cpu")
        compare(tiny, RED, out=tmp_path, attention_backend="native")


# --- what the numbers are of ---------------------------------------------------------------------


def test_the_network_number_replays_calls_of_the_baseline(pipe, settings) -> None:
    before = state(pipe)
    calls = CapturedCalls([pipe.transformer])
    with calls:
        generate(pipe, RED, settings=settings, steps=4)
    (inputs,) = calls.kept.values()
    assert len(inputs) == 4 and all(x["hidden_states"].device.type == "cpu" for x in inputs)
    exact, int8, int4 = (
        network_number(calls.kept, PatchConfig(attention=attention, guard=False))
        for attention in ("exact", "int8", "int4")
    )
    assert state(pipe) == before
    assert exact.unpatched == int8.unpatched == int4.unpatched and 1e-4 < exact.unpatched < 0.1
    assert exact.ratio < int8.ratio < int4.ratio and int8.ratio < 2.0
    guarded = network_number(calls.kept, PatchConfig(attention="int4"))
    assert guarded.ratio < int4.ratio, "it is the number of what the guard left"


@pytest.mark.parametrize(
    ("count", "kept"), [(1, [0]), (4, [0, 1, 2, 3]), (6, [0, 2, 4]), (50, [0, 16, 32, 48])]
)
def test_few_calls_are_kept_spread_over_all_of_them(count: int, kept: list[int]) -> None:
    network, x = torch.nn.Identity(), torch.zeros(2)
    calls = CapturedCalls([network])
    with calls:
        for i in range(count):
            network(x.fill_(i))
    network(x)
    assert [int(call["input"][0]) for call in calls.kept[network]] == kept


def test_both_experts_are_compared_in_their_own_steps(settings, tmp_path, monkeypatch) -> None:
    """Their network number is had after an interruption too, when the calls are gone."""
    pipe = load_pipeline(save(micro_pipe(experts=True), tmp_path / "model"), device="cpu")
    measured: list[dict[torch.nn.Module, list[Any]]] = []

    def spied(calls: Any, *given: Any, **named: Any) -> Any:
        measured.append(calls)
        return network_number(calls, *given, **named)

    monkeypatch.setattr(comparison, "measure_network", spied)
    given: dict[str, Any] = {"settings": settings, "steps": 4, "network_number": True}
    found = quick(pipe, tmp_path / "out", **given)
    guarded = {record["path"].split(".")[0] for record in found.model.patch["guard"]}
    assert guarded == {"transformer", "transformer_2", "vae"}
    for step in range(4):
        ran = {name for name, steps in found.judgement.ran.calls.items() if steps[step]}
        assert len({name.partition(".")[0] for name in ran}) == 1, (step, ran)
    (tmp_path / "out" / "runs" / "network.json").unlink()
    assert quick(pipe, tmp_path / "out", **given).model.network == found.model.network
    for calls in measured:
        assert {*calls} == {pipe.transformer, pipe.transformer_2}
        assert sum(map(len, calls.values())) == 4


def test_a_comparison_belongs_to_both_experts_and_their_adapters(settings) -> None:
    pipe = micro_pipe(experts=True)

    def identity() -> dict[str, Any]:
        return comparison.identify(pipe, settings.as_dict(), PatchConfig())

    found = [identity()]
    assert identity() == found[0]
    second = pipe.transformer_2
    for change in (
        lambda: second.blocks[1].ffn.net[2].weight.data.mul_(1.1),
        lambda: pipe.transformer.blocks[0].attn1.to_v.weight.data.mul_(1.1),
        lambda: second.add_adapter(LoraConfig(r=2, target_modules=["to_q"])),
        lambda: second.set_adapters(["default"], [0.5]),
        second.disable_adapters,
    ):
        change()
        found.append(identity())
        assert all(found[-1] != one for one in found[:-1])


def test_a_comparison_belongs_to_the_code(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "video").mkdir()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "video" / "environment.py"))
    digests = {environment.code_digest()}
    for count, text in enumerate(("a video", "another video"), 2):
        (tmp_path / "video" / "pipelines.py").write_text(text)
        digests.add(environment.code_digest())
        assert len(digests) == count


@pytest.mark.parametrize(("attention", "word"), [("int8", "unchanged"), ("int4", "changed")])
def test_the_verdict_has_power(attention: str, word: str, tmp_path: Path) -> None:
    """int4 attention must come out as changed, or the verdict proves nothing about int8."""
    found = compare(
        load_pipeline("tiny", device="cpu"), DEMO_PROMPTS[0], out=tmp_path, num_frames=5,
        config=PatchConfig(attention=attention, guard=False), network_number=False,
    )  # fmt: skip
    assert found.verdict == word
    assert all("PSNR" in reason or "frame" in reason for reason in found.judgement.reasons)


def test_the_network_number_is_left_out_where_somebody_asked(pipe, tmp_path: Path) -> None:
    """Here with the pipeline's own scheduler and guidance."""
    given = {"settings": Settings(sampler="scheduler", steps=3, guidance_scale=3.0, **SMALL)}
    for wanted in (False, True, False):
        found = quick(pipe, tmp_path, network_number=wanted, **given)
        assert (found.model.network is not None) == wanted
        assert ("not measured, as you asked" in str(found)) != wanted
        assert ("not measured, as you asked" in found.report.read_text()) != wanted


def test_a_number_that_cannot_be_measured_is_not_unchanged(pipe, tmp_path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "measure_network", full)
        found = quick(pipe, tmp_path, network_number=True)
    assert found.verdict == "undecided" and "does not fit" in str(found)
    monkeypatch.setitem(pipe.transformer.blocks[0].__dict__, "_hf_hook", object())
    found = quick(pipe, tmp_path, network_number=True)
    assert found.verdict == "undecided"
    words = "not measured: the network number (an offloaded transformer)"
    assert words in str(found) and words in found.report.read_text()


def test_upcasting_a_block_at_a_time_is_an_fp32_copy(pipe) -> None:
    network = pipe.transformer
    given = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, network.config.text_dim),
        "return_dict": False,
    }
    tensors = {name: (x.data_ptr(), x.dtype) for name, x in network.named_parameters()}
    before, wide = state(pipe)[:2], []

    def count(block: torch.nn.Module, *args: object) -> None:
        blocks = [all(p.dtype == torch.float32 for p in b.parameters()) for b in network.blocks]
        wide.append(sum(blocks))

    expected = copy.deepcopy(network).float()
    with torch.no_grad(), upcast(network):
        handles = [block.register_forward_pre_hook(count) for block in network.blocks]
        try:
            found = network(**given)[0]
        finally:
            for handle in handles:
                handle.remove()
        # One row times a matrix rounds by where the matrix lies in memory.
        assert relative_l2(found, expected(**given)[0]) < 1e-6 and found.dtype == torch.float32
    assert set(wide) == {1}
    assert {n: (x.data_ptr(), x.dtype) for n, x in network.named_parameters()} == tensors
    assert state(pipe)[:2] == before


@pytest.mark.supports("CogVideoXTransformer3DModel", "its pipeline")
def test_the_shipped_cogvideox_is_near_its_unpatched_self() -> None:
    pipe = load_pipeline("tiny-cogvideox", device="cpu")
    size = {"num_frames": 5, "height": 64, "width": 64}

    def latents() -> torch.Tensor:
        return generate(pipe, DEMO_PROMPTS[0], steps=1, sampler="scheduler", **size).latents

    before = latents()
    with patched(pipe):
        assert 0 < relative_l2(latents(), before) < 0.05
    assert torch.equal(latents(), before)


def test_names_do_not_collide() -> None:
    assert len({Store.key(*one) for one in (("a b", 0), ("a b", 1), ("a-b", 0))}) == 3
    assert Store.key("☃", 0).startswith("prompt-")
    assert len(Store.key("word " * 400, 0)) < 60 and len(Store.key("猫", 0)) > 16
