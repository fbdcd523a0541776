"""The comparison from noise to report: complete, resumable, and without a trace in the model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import imageio_ffmpeg
import pytest
import torch
from peft import LoraConfig

from tests.measures import relative_l2
from tests.video.micro import SMALL, micro_pipe, save
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.errors import AlreadyPatchedError, OutputExistsError, SamplingError
from turbo_rcm_patch.video import Source, comparison, generate
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.load import load_pipeline
from turbo_rcm_patch.video.measures import highest_precision, measure_network
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.store import Store

PROMPTS = ["a red circle moves left", "a blue square moves up"]


@pytest.fixture(scope="module")
def finished(pipe, settings, tmp_path_factory: pytest.TempPathFactory):
    """One comparison, looked at by many tests."""
    out = tmp_path_factory.mktemp("compare")
    return compare(pipe, PROMPTS, out=out, settings=settings, command="python -m x"), out


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest) -> None:
    """Only those of `finished` are looked at, which a test without a folder of its own has."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("no_pictures")


def hidden(out: Path) -> list[Path]:
    return [path for path in out.rglob(".*") if path.is_file()]


def video_shape(path: Path) -> tuple[int, int, int]:
    """Frames, height and width, by decoding the whole file."""
    program = imageio_ffmpeg.get_ffmpeg_exe()
    command = [program, "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    width, height = map(int, re.search(rb"h264.* (\d+)x(\d+)", done.stderr).groups())
    return len(done.stdout) // (width * height * 3), height, width


def fingerprint(pipe) -> dict[str, object]:
    """What patching could change: attributes of every module, and weights."""
    network = pipe.transformer
    return {
        **{name: sorted(module.__dict__) for name, module in network.named_modules()},
        **{f"w:{n}": float(p.detach().double().sum()) for n, p in network.named_parameters()},
    }


def test_everything_is_written(finished, settings: Settings) -> None:
    comparison, out = finished
    assert comparison.verdict in ("unchanged", "similar", "changed")
    for one in comparison.results:
        folder = out / "prompts" / one.key
        shapes = {p.name: video_shape(p) for p in sorted(folder.glob("*.mp4"))}
        assert sorted(shapes) == [
            "baseline.mp4", "difference.mp4", "panes.mp4", "patched.mp4", "side_by_side.mp4"
        ]  # fmt: skip
        assert all(s[0] == settings.num_frames for s in shapes.values())
        assert all(s[1] % 2 == 0 and s[2] % 2 == 0 for s in shapes.values())
        assert shapes["baseline.mp4"][1] >= 256, "small videos are enlarged to be seen"
        assert (folder / "sheet.png").read_bytes().startswith(b"\x89PNG")
    plots = sorted(path.name for path in (out / "plots").iterdir())
    assert plots == ["frames.png", "prompts.png", "steps.png"]
    assert hidden(out) == []
    assert str(out / "report.html") in str(comparison)
    assert f"verdict: {comparison.verdict}" in str(comparison)


@pytest.mark.supports("WanTransformer3DModel", "generate, compare")
def test_metrics_json_has_what_was_promised(finished, settings: Settings) -> None:
    comparison, _ = finished
    metrics = json.loads(comparison.metrics.read_text(), parse_constant=pytest.fail)
    assert metrics["schema"] == 1
    assert metrics["verdict"] == comparison.verdict
    assert [check["passed"] for check in metrics["checks"]].count(False) == len(
        comparison.judgement.reasons
    )
    assert len(metrics["prompts"]) == 2
    for one, prompt in zip(metrics["prompts"], PROMPTS, strict=True):
        assert one["prompt"] == prompt
        for run in ("patched", "control"):
            assert len(one[run]["frame_psnr"]) == settings.num_frames
            assert len(one[run]["steps"]) == settings.steps
            assert one[run]["worst_psnr"] == min(one[run]["frame_psnr"])
            assert one[run]["latents"] > 0
    for run in ("baseline", "patched"):
        assert metrics["times"][run]["first_call_seconds"] > 0
        assert metrics["times"][run]["median_seconds"] > 0
    assert {"torch", "diffusers", "triton", "python"} <= metrics["identity"]["versions"].keys()
    assert metrics["identity"]["config"]["attention"] == "auto"
    assert metrics["identity"]["settings"]["steps"] == settings.steps
    assert metrics["patch"]["impl"] == "reference"
    assert metrics["patch"]["guard"], "the guard has run"
    assert metrics["network"]["ratio"] == pytest.approx(comparison.network.ratio)
    assert metrics["fusion"]["fused_vs_unfused"] <= 3e-6
    assert metrics["control_backend"] == "math"


def test_the_report_needs_nothing_but_itself(finished) -> None:
    comparison, _ = finished
    page = comparison.report.read_text()
    assert not re.search(r"https?://", page)
    sources = re.findall(r"""(?:src|href|poster)\s*=\s*["']([^"']{0,30})""", page)
    assert len(sources) == 2 + 2 * 3, "a video a prompt, and each plot in light and in dark"
    assert all(source.startswith("data:") for source in sources)
    assert "url(" not in page
    assert "@import" not in page
    assert comparison.verdict.capitalize() in page
    assert all(prompt in page for prompt in PROMPTS)
    assert "python -m x" in page


def test_prompts_are_escaped(pipe, settings, tmp_path: Path) -> None:
    prompt = "a <b>red</b> circle & 'more'"
    page = compare(pipe, prompt, out=tmp_path, settings=settings).report.read_text()
    assert "<b>red</b>" not in page
    assert "a &lt;b&gt;red&lt;/b&gt; circle" in page


def test_finished_work_is_kept(pipe, settings, finished, monkeypatch) -> None:
    comparison, out = finished
    calls = count_generations(monkeypatch)
    again = compare(pipe, PROMPTS, out=out, settings=settings)
    assert calls == []
    assert again.results == comparison.results
    more = compare(pipe, [*PROMPTS, "a green ring"], out=out, settings=settings)
    assert len(calls) == 2 + 2 + 1, "the new prompt three times, and two warm-ups"
    assert more.results[:2] == comparison.results


def test_a_new_start_on_request_only(pipe, settings, tmp_path: Path, monkeypatch) -> None:
    compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)
    own = [tmp_path / name for name in ("notes.txt", "prompts/my_prompts.txt", "plots/thesis.png")]
    own.append(next(tmp_path.glob("prompts/*/sheet.png")).with_name("mine.mp4"))
    for path in own:
        path.write_text("mine")
    other = Settings.for_model(None, **(settings.as_dict() | {"steps": 1}))
    with pytest.raises(SamplingError, match=r"same settings.*--fresh"):
        compare(pipe, PROMPTS[0], out=tmp_path, settings=other)
    with pytest.raises(SamplingError, match="same config"):
        compare(pipe, PROMPTS[0], out=tmp_path, settings=settings, config=PatchConfig(guard=False))
    calls = count_generations(monkeypatch)
    compare(pipe, PROMPTS[0], out=tmp_path, settings=other, fresh=True)
    assert len(calls) == 5
    assert [path.read_text() for path in own] == ["mine"] * 4


@pytest.mark.parametrize("stage", ["baseline", "patched", "control", "videos"])
def test_an_interruption_leaves_nothing_half_done(
    pipe, settings, finished, tmp_path: Path, stage: str
) -> None:
    before = fingerprint(pipe)

    def stop(what: str, done: int, total: int) -> None:
        if what == stage and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(pipe, PROMPTS, out=tmp_path, settings=settings, progress=stop)
    assert fingerprint(pipe) == before
    assert hidden(tmp_path) == []
    assert not (tmp_path / "report.html").exists()
    resumed = compare(pipe, PROMPTS, out=tmp_path, settings=settings)
    reference, _ = finished
    for one, other in zip(resumed.results, reference.results, strict=True):
        assert one.patched == other.patched, "a resumed comparison finds the same numbers"
        assert one.control == other.control
    assert resumed.patch_report


def test_global_state_is_untouched(pipe, settings, tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        cuda = torch.backends.cuda
        return (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.nn.functional.scaled_dot_product_attention,
            torch.get_default_dtype(),
            torch.random.get_rng_state().tolist(),
            torch.is_grad_enabled(),
        )

    before, model = state(), fingerprint(pipe)
    compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)
    assert state() == before
    assert fingerprint(pipe) == model


def test_a_bit_equal_control_is_an_error(pipe, settings, tmp_path: Path, monkeypatch) -> None:
    # On a CPU the native backend is flash, so flash as the control changes nothing.
    monkeypatch.setattr(comparison, "candidates", lambda _: ("flash",))
    with pytest.raises(SamplingError, match="flash is bit-equal to the baseline"):
        compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)


def test_the_next_backend_is_tried(pipe, settings, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(comparison, "candidates", lambda _: ("flash", "cudnn", "math"))
    found = compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)
    assert found.control_backend == "math"
    assert comparison.candidates(torch.device("cuda"))[0] == "flash"


def test_a_broken_baseline_is_an_error(micro_folder, settings, tmp_path: Path) -> None:
    pipe = load_pipeline(micro_folder, device="cpu")
    pipe.transformer.proj_out.bias.data.fill_(float("nan"))
    with pytest.raises(SamplingError, match="NaN"):
        compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)


def test_a_patched_model_is_refused(micro_folder, settings, tmp_path: Path) -> None:
    pipe = load_pipeline(micro_folder, device="cpu")
    with patched(pipe.transformer), pytest.raises(AlreadyPatchedError):
        compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)


def test_prompts_and_folder_are_checked(pipe, settings, tmp_path: Path) -> None:
    for prompts in ([], [" "]):
        with pytest.raises(SamplingError, match="none of them empty"):
            compare(pipe, prompts, out=tmp_path, settings=settings)
    (tmp_path / "file").write_text("")
    with pytest.raises(SamplingError, match="is a file.*--out DIR"):
        compare(pipe, PROMPTS[0], out=tmp_path / "file", settings=settings)


def test_the_network_number(pipe, settings) -> None:
    from turbo_rcm_patch.video.generation import encode

    conditioning = encode(pipe, Source(PROMPTS[0]), settings)
    clean = torch.zeros(1, 4, 2, 4, 4)
    with pipe.transformer.cache_context("cond"):  # diffusers keeps a registry from here on.
        before = fingerprint(pipe)
    number = measure_network(pipe, conditioning, clean, settings, PatchConfig())
    worse = measure_network(pipe, conditioning, clean, settings, PatchConfig(attention="int4"))
    assert fingerprint(pipe) == before
    assert 1e-4 < number.unpatched < 0.1
    assert number.unpatched == worse.unpatched
    assert worse.ratio > number.ratio
    assert number.ratio < 2.0


def test_the_network_number_is_that_of_what_the_guard_chose(pipe, settings) -> None:
    from turbo_rcm_patch.video.generation import encode

    conditioning, clean = encode(pipe, Source(PROMPTS[0]), settings), torch.zeros(1, 4, 2, 4, 4)

    def ratio(**options: object) -> float:
        config = PatchConfig(residual="model", **options)
        return measure_network(pipe, conditioning, clean, settings, config).ratio

    exact, fixed = ratio(attention="exact", guard=False), ratio(precision="fixed")
    assert exact < fixed == ratio(fidelity=1e6)
    assert ratio(fidelity=1.0) == exact


def test_a_calibration_of_the_pipeline_serves_a_comparison(pipe, settings, tmp_path: Path) -> None:
    with patched(pipe, fidelity=1.0, residual="model") as report:
        generate(pipe, PROMPTS[0], settings=settings)
        report.save_calibration(tmp_path / "kept.json")
    config = PatchConfig(calibration=tmp_path / "kept.json")
    found = compare(pipe, PROMPTS[0], out=tmp_path / "out", settings=settings, config=config)
    assert found.network is not None and "as calibrated" in found.patch_report


def test_a_comparison_belongs_to_both_experts_their_adapters_and_a_calibration(
    settings, tmp_path: Path
) -> None:
    pipe, kept = micro_pipe(experts=True), tmp_path / "kept.json"
    kept.write_text("one", encoding="utf-8")
    config = PatchConfig(calibration=kept)
    found = [comparison.identify(pipe, settings, config)]
    assert comparison.identify(pipe, settings, config) == found[0]

    def is_another() -> None:
        found.append(comparison.identify(pipe, settings, config))
        assert all(found[-1] != one for one in found[:-1])

    kept.write_text("two", encoding="utf-8")
    is_another()
    pipe.transformer_2.blocks[1].ffn.net[2].weight.data.mul_(1.1)
    is_another()
    pipe.transformer.blocks[0].attn1.to_v.weight.data.mul_(1.1)
    is_another()
    pipe.transformer_2.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    is_another()
    pipe.transformer_2.set_adapters(["default"], [0.5])
    is_another()
    pipe.transformer_2.disable_adapters()
    is_another()


def test_highest_precision_restores_flags_after_an_exception() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        with pytest.raises(KeyboardInterrupt), highest_precision():
            assert not matmul.allow_tf32
            raise KeyboardInterrupt
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


@pytest.mark.parametrize(("attention", "word"), [("int8", "unchanged"), ("int4", "changed")])
def test_int4_is_changed_where_int8_is_not(
    pipe, tmp_path: Path, attention: str, word: str
) -> None:
    settings = Settings(**(SMALL | {"height": 64, "width": 64, "num_frames": 9}))
    config = PatchConfig(attention=attention, guard=False)
    found = compare(
        pipe, PROMPTS, out=tmp_path, settings=settings, config=config, network_number=False
    )
    assert found.verdict == word
    assert all("PSNR" in reason or "frame" in reason for reason in found.judgement.reasons)


@pytest.mark.parametrize("attention", ["int8", "int4"])
def test_the_verdict_has_power(attention: str, tmp_path: Path) -> None:
    """int4 attention must come out as changed, or the verdict proves nothing about int8."""
    from turbo_rcm_patch.tiny.prompts import DEMO_PROMPTS

    found = compare(
        load_pipeline("tiny", device="cpu"),
        DEMO_PROMPTS[:2],
        out=tmp_path,
        config=PatchConfig(attention=attention, guard=False),
        network_number=False,
    )
    assert found.verdict == ("unchanged" if attention == "int8" else "changed")


def test_names_do_not_collide() -> None:
    assert Store.key("a b", 0) != Store.key("a b", 1)
    assert Store.key("a b", 0) != Store.key("a-b", 0)
    assert Store.key("☃", 0).startswith("prompt-")
    assert len(Store.key("word " * 400, 0)) < 60


def count_generations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = comparison.sample_latents

    def counted(*args: object, **kwargs: object):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(comparison, "sample_latents", counted)
    return calls


def test_both_experts_are_compared(settings, tmp_path: Path) -> None:
    folder = save(micro_pipe(experts=True), tmp_path / "model")
    pipe = load_pipeline(folder, device="cpu")
    steps = Settings.for_model(None, **(settings.as_dict() | {"steps": 3}))
    found = compare(pipe, PROMPTS[0], out=tmp_path / "out", settings=steps)
    metrics = json.loads(found.metrics.read_text())
    guarded = {record["path"].split(".")[0] for record in metrics["patch"]["guard"]}
    assert guarded == {"transformer", "transformer_2"}


def test_the_pipelines_own_scheduler_with_guidance(pipe, tmp_path: Path) -> None:
    settings = Settings(sampler="scheduler", steps=3, guidance_scale=3.0, **SMALL)
    found = compare(pipe, PROMPTS[0], out=tmp_path, settings=settings, network_number=False)
    assert found.network is None
    assert len(found.results[0].patched.steps) == 3
    assert "not measured" in found.report.read_text()


def test_what_cannot_be_measured_is_told_at_once(pipe, settings, tmp_path, monkeypatch) -> None:
    calls = count_generations(monkeypatch)
    monkeypatch.setitem(pipe.transformer.blocks[0].__dict__, "_hf_hook", object())
    with pytest.raises(SamplingError, match="Leave out --network-number"):
        compare(pipe, PROMPTS[0], out=tmp_path, settings=settings, network_number=True)
    assert calls == []


def test_a_number_that_is_missing_is_not_unchanged(pipe, settings, tmp_path, monkeypatch) -> None:
    """By default it is measured whatever the size; what cannot be measured is told."""
    found = compare(pipe, PROMPTS[0], out=tmp_path / "large", settings=settings)
    assert found.network is not None and "not measured" not in str(found)
    monkeypatch.setattr(
        comparison, "why_no_network", lambda pipe, wanted: "an offloaded transformer"
    )
    found = compare(pipe, PROMPTS[0], out=tmp_path / "offloaded", settings=settings)
    assert found.verdict == "undecided"
    assert "not measured: the network number (an offloaded transformer)" in str(found)
    assert (
        "not measured: the network number (an offloaded transformer)" in found.report.read_text()
    )


def test_memory_that_runs_out_is_told(pipe, settings, tmp_path, monkeypatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(comparison, "measure_network", full)
    found = compare(pipe, PROMPTS[0], out=tmp_path, settings=settings)
    assert found.verdict == "undecided" and "does not fit" in str(found)


def test_upcasting_a_block_at_a_time_is_an_fp32_copy(pipe, monkeypatch) -> None:
    import copy

    from turbo_rcm_patch.video.measures import upcast

    network = pipe.transformer
    given = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, network.config.text_dim),
        "return_dict": False,
    }
    before = {name: (x.data_ptr(), x.dtype) for name, x in network.named_parameters()}
    hooks = [len(module._forward_hooks) for module in network.modules()]
    wide = 0

    def count(block: torch.nn.Module, *args: object) -> None:
        nonlocal wide
        wide = max(
            wide,
            sum(all(p.dtype == torch.float32 for p in b.parameters()) for b in network.blocks),
        )

    with torch.no_grad():
        expected = copy.deepcopy(network).float()(**given)[0]
        with upcast(network):
            handles = [b.register_forward_pre_hook(count) for b in network.blocks]
            found = network(**given)[0]
            for handle in handles:
                handle.remove()
        with pytest.raises(RuntimeError, match="stopped"), upcast(network):
            monkeypatch.setattr(type(network.blocks[1].ffn), "forward", _stop)
            network(**given)
    # One row times a matrix rounds by where the matrix lies in memory.
    assert relative_l2(found, expected) < 1e-6 and found.dtype == torch.float32
    assert wide == 1
    assert {name: (x.data_ptr(), x.dtype) for name, x in network.named_parameters()} == before
    assert [len(module._forward_hooks) for module in network.modules()] == hooks


def _stop(*args: object) -> None:
    raise RuntimeError("stopped")


def test_two_processes_in_one_folder_know_each_other_s_files(tmp_path: Path) -> None:
    one, other = (Store(tmp_path, {"model": "x"}, fresh=False) for _ in range(2))
    one.write_json("runs/baseline.json", {"from": "one"})
    other.write_json("runs/baseline.json", {"from": "other"})
    assert one.read_json("runs/baseline.json") == {"from": "other"}
    (tmp_path / "runs/patched.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OutputExistsError):
        other.write_json("runs/patched.json", {})
