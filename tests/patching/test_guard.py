"""The guard: which forwards it looks at, what it decides, and that the decision stays."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import nn

from tests.patching.wan import CASES, relative, run, wan
from turbo_rcm_patch import PatchConfig, patch_model, patched, unpatch_model
from turbo_rcm_patch.patching import guard as guard_module
from turbo_rcm_patch.patching.report import PatchReport


def seen(report: PatchReport) -> list[tuple[int | None, str]]:
    """(step, when) of each comparison of one pair, but those between the first and last step."""
    path = report.pairs[0].path
    found = [(record.step, record.when) for record in report.guard if record.path == path]
    return [(step, when) for step, when in found if when != "middle"]


def between(report: PatchReport) -> list[tuple[int | None, str]]:
    """(step, path) of each comparison between the first and the last step."""
    return [(record.step, record.path) for record in report.guard if record.when == "middle"]


def denoise(model: Any, steps: int, names: tuple[str, ...] = ("cond", "uncond")) -> None:
    for step in range(steps):
        for name in names:
            with model.cache_context(name, step_index=step, num_inference_steps=steps):
                run(model)


@pytest.mark.supports("WanTransformer3DModel", "the guard")
def test_first_and_last_step_with_guidance() -> None:
    model = wan()
    report = patch_model(model)
    denoise(model, 4)
    assert seen(report) == [(0, "first"), (0, "first"), (3, "last"), (3, "last")]
    assert len(report.guard) == 4 * 6 + 2
    assert all(record.verdict == "kept" for record in report.guard)
    assert all(0 <= record.error < 0.05 for record in report.guard)
    denoise(model, 4)
    assert len(report.guard) == 4 * 6 + 4
    assert [step for step, _ in between(report)] == [1, 2, 1, 2]


def test_a_single_step_is_both() -> None:
    model = wan()
    report = patch_model(model)
    denoise(model, 1, ("cond",))
    denoise(model, 1, ("cond",))
    assert seen(report) == [(0, "first")]


def test_a_bare_model_checks_the_first_forward_and_what_is_asked_for() -> None:
    model = wan()
    report = patch_model(model)
    for _ in range(3):
        run(model)
    assert seen(report) == [(None, "first")]
    report.guard.check_next()
    run(model)
    run(model)
    assert seen(report) == [(None, "first"), (None, "asked")]


def test_switched_off() -> None:
    model = wan()
    before = set(vars(model))
    report = patch_model(model, PatchConfig(guard=False))
    assert set(vars(model)) - before == {
        "_turbo_rcm_patch", "_apply", "load_state_dict", "enable_parallelism",
    }  # fmt: skip
    denoise(model, 2)
    assert len(report.guard) == 0 and "guard: off" in str(report)


@pytest.mark.supports("WanTransformer3DModel", "the guard")
def test_over_budget_goes_back_to_the_author_s_code() -> None:
    model = wan()
    expected = run(model)
    report = patch_model(model, PatchConfig(attention="int4", guard_budget=1e-3))
    output = run(model)
    back = [pair for pair in report.pairs if not pair.fused]
    assert [pair.kind for pair in back] == ["self", "cross"] * 2
    assert report.fused == 2
    assert all("exceeds the budget of 0.001" in pair.reason for pair in back)
    assert "given back: blocks.0.attn1 at 0." in str(report)
    assert relative(output, expected) < 1e-5
    assert relative(run(model), expected) < 1e-5
    unpatch_model(model)
    assert torch.equal(run(model), expected)


@pytest.mark.usefixtures("no_plans")
def test_only_the_pair_that_fails_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wan()
    from turbo_rcm_patch import ops

    real = ops.project_skip
    bad = model.blocks[1].ffn.net[2].weight

    def broken(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = real(x, weight, *args, **kwargs)
        return out * float("nan") if weight is bad else out

    expected = run(model)
    monkeypatch.setattr(ops, "project_skip", broken)
    report = patch_model(model, PatchConfig(attention="exact"))
    assert relative(run(model), expected) < 1e-5
    assert [pair.path for pair in report.pairs if not pair.fused] == ["blocks.1.ffn"]
    (record,) = [record for record in report.guard if record.verdict == "given back"]
    assert record.error == float("inf")
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("bad", ["blocks.0.ffn", "blocks.1.norm1"])
def test_what_a_module_of_the_author_s_makes_infinite_costs_only_that_pair(
    bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is behind it could show nothing on that forward, and shows it on the next one."""
    model = wan()
    report = patch_model(model, attention="exact")
    expected = run(model)
    report.guard.check_next()
    with torch.no_grad():
        hook = model.get_submodule(bad).register_forward_hook(lambda *x: x[-1] / 0.0)
        assert not run(model).isfinite().any()
        hook.remove()
    (pair,) = (pair.path for pair in report.pairs if not pair.fused)
    behind = [one.path for one in report.pairs][[one.path for one in report.pairs].index(pair) :]
    assert pair == {"blocks.0.ffn": "blocks.0.ffn", "blocks.1.norm1": "blocks.1.attn1"}[bad]
    compared = len(report.guard)
    said = [m for m in caplog.messages if "residual stream before it are not finite" in m]
    assert len(said) == 1 and said[0].startswith(behind[1])
    assert relative(run(model), expected) < 1e-5
    assert [record.path for record in report.guard[compared:]] == behind[1:]
    assert report.fused == len(report.pairs) - 1


def test_image_branch_and_cross_attention_share_a_verdict() -> None:
    case = CASES[1]
    model, inputs = case.model(), case.inputs()
    expected = run(model, **inputs)
    report = patch_model(
        model, PatchConfig(attention="int4", guard_budget=1e-3, kinds=("cross", "image"))
    )
    assert relative(run(model, **inputs), expected) < 1e-5
    assert {record.path for record in report.guard} == {
        f"blocks.{i}.attn2{end}" for i in (0, 1) for end in ("", ".image")
    }
    assert report.fused == 0


def test_no_collective_whatever_process_group_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins none of ours, because it runs other forwards, must not hang another."""
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def called(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective in the default process group")

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
        monkeypatch.setattr(dist, name, called)
    model = wan()
    report = patch_model(model)
    run(model)
    assert len(report.guard) == report.fused == 6


def pipeline(second: bool) -> Any:
    parts = {"transformer": wan(), "transformer_2": wan() if second else None}
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        boundary_ratio=0.6 if second else None,
        **parts,
    )


def generate(pipe: Any, steps: int) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    text = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    latents: torch.Tensor = pipe(
        prompt_embeds=text,
        negative_prompt_embeds=torch.zeros_like(text),
        guidance_scale=2.0,
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).frames
    return latents


@pytest.mark.supports("WanTransformer3DModel", "its pipeline")
def test_a_real_pipeline() -> None:
    pipe = pipeline(second=False)
    expected = generate(pipe, 3)
    with patched(pipe) as report:
        output = generate(pipe, 3)
    assert seen(report) == [(0, "first")] * 2 + [(2, "last")] * 2
    assert 0 < relative(output, expected) < 0.05
    assert torch.equal(generate(pipe, 3), expected)
    with patched(pipe.transformer) as report:
        generate(pipe, 3)
    assert seen(report) == [(0, "first")] * 2 + [(2, "last")] * 2


def test_a_real_pipeline_with_two_experts() -> None:
    pipe = pipeline(second=True)
    with patched(pipe, precision="fixed") as report:
        generate(pipe, 6)
        timesteps = pipe.scheduler.timesteps
    switch = int((timesteps >= 600).sum())
    assert 1 < switch < 5
    for component, first, last in (("transformer", 0, switch - 1), ("transformer_2", switch, 5)):
        steps = [
            (record.step, record.when)
            for record in report.guard
            if record.path == f"{component}.blocks.0.attn1" and record.when != "middle"
        ]
        assert steps == [(first, "first")] * 2 + [(last, "last")] * 2


@pytest.mark.parametrize("second", [False, True], ids=["one", "two-experts"])
@pytest.mark.parametrize("graphs", [False, True], ids=["", "cuda-graphs"])
def test_steps_between_are_compared_in_runs_of_other_lengths(second: bool, graphs: bool) -> None:
    """A run may begin where the one before ended, or with an expert behind it."""
    pipe = pipeline(second)
    with patched(pipe, cuda_graphs=graphs) as report:
        for steps in (1, 6, 4, 8):
            before = len(between(report))
            generate(pipe, steps)
            found = between(report)[before:]
            switch = int((pipe.scheduler.timesteps >= 600).sum()) if second else 0
            last = "transformer_2." if second else ""
            its = [step for step, path in found if path.startswith(last)]
            seen_before = switch if second and steps == 6 else 0
            expected = list(range(max(1, switch, seen_before + 1), steps - 1))
            if graphs:
                assert len(set(its)) == min(1, len(expected)), (steps, found)
            else:
                assert its == expected, (steps, found)


def test_a_loop_that_begins_in_the_middle_is_at_that_step() -> None:
    model = wan()
    scheduler = SimpleNamespace(timesteps=torch.arange(6), _step_index=None, _begin_index=None)
    pipe = type("Pipe", (), {"transformer": model, "scheduler": scheduler})()
    report = patch_model(pipe)
    for timestep in scheduler.timesteps[5:]:
        pipe._current_timestep = timestep
        with model.cache_context("cond"):
            run(model)
    assert report.guard[0].step == 5
    assert all("last" not in state.unseen for state in model._turbo_rcm_patch.plan.states)


def test_a_pipeline_that_does_not_say_its_step() -> None:
    """The scheduler's own counter is read, as for diffusers' image-to-video pipeline."""
    model = wan()
    pipe = SimpleNamespace(
        transformer=model,
        scheduler=SimpleNamespace(timesteps=torch.arange(3), _step_index=None),
        _current_timestep=1,
    )
    # A namespace cannot be referenced weakly.
    holder = type("Pipe", (), dict(vars(pipe)))()
    report = patch_model(holder)
    for step in range(3):
        holder.scheduler._step_index = step
        for name in ("cond", "uncond"):
            with model.cache_context(name):
                run(model)
    assert seen(report) == [(0, "first")] * 2 + [(2, "last")] * 2


def test_inert_while_compiling() -> None:
    torch._dynamo.reset()
    model = wan()
    with patched(model) as report:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        run(compiled)
        assert len(report.guard) == 0
    torch._dynamo.reset()


def test_cost_in_steady_state_is_no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wan()
    patch_model(model)
    denoise(model, 2)

    def synchronises(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a value was asked for")

    for name in ("item", "__bool__", "__float__", "__int__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, synchronises)
    run(model)


def test_hidden_in_a_module_without_cache_context() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wan()

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    model = Wrapper()
    with patched(model) as report:
        run(model)
    assert seen(report) == [(None, "first")]


def test_auto_precision_makes_an_attention_exact_before_it_gives_it_back() -> None:
    model = wan()
    before = run(model)
    report = patch_model(model, PatchConfig(precision="auto", guard_budget=1e-4))
    first = run(model)
    steps = [record.verdict for record in report.guard if record.path == "blocks.0.attn1"]
    assert steps == ["16-bit p and v", "exact attention", "kept"]
    # Over few keys cross-attention is exact as it is.
    cross = [record.verdict for record in report.guard if record.path == "blocks.0.attn2"]
    assert cross == ["kept"]
    assert report.fused == len(report.pairs)
    assert "attention made exact by the guard" in str(report)
    assert "2 made more precise" in str(report)
    assert relative(first, before) < 1e-5
    assert torch.equal(run(model), first)
    unpatch_model(model)
    assert torch.equal(run(model), before)


def test_auto_precision_keeps_what_is_within_the_budget() -> None:
    """And within the target for the network, which heads as peaked as these do not meet at 1.1."""
    model = wan()
    report = patch_model(model, PatchConfig(precision="auto", fidelity=10.0))
    run(model)
    assert {record.verdict for record in report.guard} == {"kept"}


@pytest.mark.usefixtures("no_plans")
def test_the_first_half_of_a_feed_forward_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch import ops

    right = ops.linear_gelu
    monkeypatch.setattr(ops, "linear_gelu", lambda *given: 3 * right(*given))
    model = wan()
    before = run(model)
    report = patch_model(model)
    after = run(model)
    verdicts = {r.path: r.verdict for r in report.guard if r.path.endswith("ffn")}
    assert set(verdicts.values()) == {"given back"}
    assert relative(after, before) < 0.05


def test_auto_precision_does_not_lower_what_was_asked_for() -> None:
    model = wan()
    report = patch_model(model, PatchConfig(precision="auto", pv="fp16", guard_budget=1e-4))
    run(model)
    steps = [record.verdict for record in report.guard if record.path == "blocks.0.attn1"]
    assert steps == ["exact attention", "kept"]


def test_an_attention_made_exact_is_two_launches_in_the_report() -> None:
    model = wan()
    config = PatchConfig(precision="auto", form="one-launch", guard_budget=1e-4)
    report = patch_model(model, config)
    assert report.pairs[0].runs == "one-launch"
    run(model)
    assert report.pairs[0].runs == "two-launch"


# --- between the first and the last step ---------------------------------------------------------


def test_each_step_between_compares_another_pair_on_one_of_its_forwards() -> None:
    model = wan()
    report = patch_model(model)
    denoise(model, 8)
    found = between(report)
    assert [step for step, _ in found] == list(range(1, 7))
    assert sorted(path for _, path in found) == sorted(pair.path for pair in report.pairs)
    denoise(model, 8)
    assert [step for step, _ in between(report)[6:]] == list(range(1, 7))


def test_many_pairs_are_seen_evenly() -> None:
    """Of 90 pairs as of 30 blocks: nearly each block within one run of 30 steps."""
    from turbo_rcm_patch.patching.guard import Guard, _Thread

    model = wan()
    patch_model(model)
    record: Any = model._turbo_rcm_patch
    states = [copy.copy(record.plan.states[0]) for _ in range(90)]
    guard = Guard(PatchConfig(), "", record.log, None, model, states)
    here, seen_states = _Thread(), []
    for turn in range(90):
        guard._choose(here, turn)
        seen_states += [i for i, state in enumerate(states) if id(state) in here.chosen]
    assert sorted(seen_states) == list(range(90)), "one a turn, and all of them"
    assert len({index // 3 for index in seen_states[:28]}) >= 24


def test_a_bare_model_compares_a_pair_now_and_then() -> None:
    model = wan()
    report = patch_model(model)
    for _ in range(17):
        run(model)
    assert len(report.guard) == 6 + 2 == len(report.pairs) + len(between(report))
    assert between(report)[0][0] is None and "middle step" not in str(report.guard)


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("steps", [4, 30])
def test_an_error_in_the_middle_timesteps_only(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pair shows it, and then every pair is compared."""
    from turbo_rcm_patch import ops

    model = wan()
    step, right = -1, ops.project_skip

    def wrong(x: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        middle = 0 < step < steps - 1
        return right(1.3 * x if middle else x, *args, **given)

    monkeypatch.setattr(ops, "project_skip", wrong)
    report = patch_model(model, PatchConfig(attention="exact", form="two-launch"))
    for step in range(steps):  # noqa: B007 - the mutant reads it
        for name in ("cond", "uncond"):
            with model.cache_context(name, step_index=step, num_inference_steps=steps):
                run(model)
    back = {record.path: record.when for record in report.guard if record.verdict != "kept"}
    broken = {pair.path for pair in report.pairs}
    assert set(back) == broken and report.fused == 0
    assert sorted(back.values()) == ["asked"] * 5 + ["middle"]


def run_steps(model: Any, report: PatchReport, *steps: int) -> None:
    guard: Any = report.guard._guards[0]
    for step in steps:
        guard.enter("cond", step, 8)
        run(model)
        guard.leave()


def test_a_pair_that_a_step_mends_between_the_steps_has_all_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, wrong = wan(), False
    report = patch_model(model, linear="int8", precision="fixed")
    right = guard_module.Guard._measured

    def outgrown(self: Any, reference: Any, result: Any, pair: Any) -> Any:
        found = right(self, reference, result, pair)
        return replace(found, error=0.5) if wrong and pair.states[0].int8 else found

    monkeypatch.setattr(guard_module.Guard, "_measured", outgrown)
    run_steps(model, report, 0)
    wrong, before = True, len(report.guard)
    run_steps(model, report, 1, 2)
    records = list(report.guard)[before:]
    assert records[0].when == "middle" and records[0].verdict == "linears given back"
    assert {r.path for r in records if r.when == "asked"} == {p.path for p in report.pairs}


@pytest.mark.usefixtures("no_plans")
def test_nan_of_a_pair_that_is_not_compared_has_all_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from turbo_rcm_patch import ops

    model, wrong = wan(), False
    right = ops.project_skip

    def broken(*args: Any, **given: Any) -> torch.Tensor:
        return right(*args, **given) * (float("nan") if wrong else 1.0)

    monkeypatch.setattr(ops, "project_skip", broken)
    report = patch_model(model, PatchConfig(attention="exact", form="two-launch"))
    run_steps(model, report, 0, 1)
    wrong = True  # The next turn is that of a pair behind the first one.
    run_steps(model, report, 2, 3)
    told = [r for r in report.guard if r.verdict == "not compared"]
    assert all(r.error == float("inf") for r in told)
    assert torch.isfinite(run(model)).all()
    assert told and report.fused == 0 and "given back" in str(report.guard)


def test_a_step_between_costs_no_second_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours runs once and the author's once, but for the gate."""
    from turbo_rcm_patch.patching import guard

    model = wan()
    patch_model(model)
    denoise(model, 2)
    calls: list[str] = []
    right = guard._Reference.__init__

    def counted(self: Any, pair: Any, notes: Any, **given: Any) -> None:
        author, ours, attention = pair.author, pair.ours, pair.attention

        def written(notes: Any, x: Any, instead: Any) -> Any:
            calls.append("author" if instead is None else instead.__name__)
            return author(notes, x, instead)

        pair.author = written
        pair.ours = lambda: (calls.append("ours"), ours())[1]
        pair.attention = lambda: (calls.append("attention"), attention())[1]
        right(self, pair, notes, **given)

    monkeypatch.setattr(guard._Reference, "__init__", counted)
    monkeypatch.setattr(
        guard.Notes, "last_keys", lambda self: pytest.fail("a third attention runs")
    )
    with model.cache_context("cond", step_index=1, num_inference_steps=3):
        run(model)
    assert calls in (["author", "ones"], ["author"])


# --- a pair that was given back ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_family_gets_wrong_is_its_author_s_after_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the modulation that a feed-forward reads, and the norm in front of it."""
    from turbo_rcm_patch.patching.families.wan_block import WanBlockForward

    case = CASES[0]
    model, inputs = case.model(dtype), case.inputs(2, dtype)
    expected = run(model, **inputs)
    for wrong in ({"at": 0}, {"norm": "norm2", "at": None}):
        branches = (*WanBlockForward.branches[:2], replace(WanBlockForward.branches[2], **wrong))  # type: ignore[arg-type]
        with monkeypatch.context() as patch, patched(model, kinds=("feed-forward",)) as report:
            patch.setattr(WanBlockForward, "branches", branches)
            for _ in range(3):
                assert torch.equal(run(model, **inputs), expected)
            assert report.fused == 0 and report.last_forward == {"as written": 6}


def test_hooks_of_a_pair_that_was_given_back_run_once() -> None:
    model = wan()
    report = patch_model(model, PatchConfig(attention="int4", guard_budget=1e-3))
    run(model)
    assert [pair.path for pair in report.pairs if not pair.fused][0] == "blocks.0.attn1"
    calls: list[str] = []
    for name, module in model.blocks[0].named_modules():
        if name in ("norm1", "attn1", "attn1.to_q", "attn1.to_out.0", "attn2", "ffn", "norm3"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    run(model)
    assert sorted(calls) == sorted(set(calls)) and {"norm1", "attn1", "attn1.to_q"} <= {*calls}


def test_ranks_compare_the_same_pairs_between_the_steps() -> None:
    """Whatever each of them has seen before."""
    whens: Any = ("first", "last", "asked", "middle")
    guards, paths = [], []
    for before in (0, 5):
        model = wan()
        report = patch_model(model)
        denoise(model, 2)
        guard = report.guard._guards[0]
        guard._turn = before
        guard.enter("cond", 1, 4)
        guard.begin(x=torch.ones(1))
        guards.append((guard, model._turbo_rcm_patch.plan.states))
    agreed = [max(column) for column in zip(*(g.begun(whens) for g, _ in guards), strict=True)]
    assert agreed == [0, 0, 0, 1, 0, 5]
    for guard, states in guards:
        guard.resume(["middle"], agreed[-1])
        here = guard._here
        paths.append([state.pair.path for state in states if id(state) in here.chosen])
        assert guard._turn == 6
    assert paths[0] == paths[1] and len(paths[0]) == 1


def test_a_log_does_not_grow_with_the_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch.patching import report as module

    monkeypatch.setattr(module, "_MOST_BETWEEN", 8)
    model = wan()
    report = patch_model(model)
    denoise(model, 2)
    kept = list(report.guard)
    worst = replace(kept[0], when="middle", error=0.09)
    report.guard.add(worst)
    for step in range(100):
        report.guard.add(replace(kept[0], when="middle", step=step, error=0.01))
    rest = list(report.guard)[len(kept) :]
    assert list(report.guard)[: len(kept)] == kept and 8 < len(rest) <= 17
    assert rest[0] == worst and [one.step for one in rest[-8:]] == list(range(92, 100))
    assert "largest error 0.09" in str(report.guard)
