"""What the guard leaves behind: nothing. And what it has yet to see: what no forward showed it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import TaylorSeerCacheConfig
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint

from tests.patching import cogvideox, turbodiffusion
from tests.patching.test_guard_mutants import SUBJECTS, Subject, output_of
from tests.patching.wan import CASES, relative, run, wan
from turbo_rcm_patch import PatchConfig, patch_model, patched
from turbo_rcm_patch.patching.guard import Guard
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.report import PatchReport

LORA = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.2"]


def with_lora(dropout: float = 0.0) -> Any:
    model = wan()
    torch.manual_seed(7)
    model.add_adapter(
        LoraConfig(r=4, target_modules=LORA, init_lora_weights=False, lora_dropout=dropout)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model.train()


def first_gradients(model: Any, config: PatchConfig | None) -> torch.Tensor:
    """Of the LoRA, on the first step; unpatched without a configuration."""
    if config is not None:
        patch_model(model, config)
    torch.manual_seed(3)
    model(**CASES[0].inputs())[0].square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def test_the_first_gradients_with_int8_linears_are_those_without_the_guard() -> None:
    """A tensor that was made without gradients and is kept loses them all."""
    with_guard = first_gradients(with_lora(), PatchConfig(attention="exact", linear="int8"))
    without = first_gradients(
        with_lora(), PatchConfig(attention="exact", linear="int8", guard=False)
    )
    assert torch.equal(with_guard, without)


def test_training_is_not_checked_and_the_next_inference_is() -> None:
    model = with_lora(dropout=0.5)
    expected = first_gradients(with_lora(dropout=0.5), None)
    report = patch_model(model, PatchConfig(attention="exact", guard_budget=1e-9))
    torch.manual_seed(3)
    model(**CASES[0].inputs())[0].square().mean().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert len(report.guard) == 0 and report.fused == 6
    assert relative(found, expected) < 1e-4
    run(model)  # Its dropout is still active.
    assert len(report.guard) == 0
    model.eval()
    run(model)
    assert len(report.guard) > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("budget", [1e-9, 10.0])
def test_a_checkpointed_forward_runs_the_same_twice(reentrant: bool, budget: float) -> None:
    """The backward pass runs it again, when the guard is done: both have to be the same code."""

    def gradient(config: PatchConfig | None) -> torch.Tensor:
        model = wan()
        if config is not None:
            patch_model(model, config)
        given = CASES[0].inputs()
        x = given.pop("hidden_states").requires_grad_()
        checkpoint(lambda x: model(x, **given)[0], x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        return x.grad

    config = PatchConfig(attention="exact", guard_budget=budget)
    assert relative(gradient(config), gradient(None)) < 1e-4


def test_a_forward_that_is_differentiated_forwards_is_not_checked() -> None:
    model = wan()
    report = patch_model(model)
    with torch.autograd.forward_ad.dual_level():
        run(model)
    assert len(report.guard) == 0
    given = CASES[0].inputs()
    torch.func.vmap(lambda x: run(model, **given) + x)(torch.zeros(2))
    assert len(report.guard) == 0
    run(model)
    assert len(report.guard) == 6


def counted(model: Any, pick: Callable[[Any], bool]) -> Counter[str]:
    """How often hooked modules are called from now on."""
    calls: Counter[str] = Counter()

    def hook(name: str) -> Callable[..., None]:
        return lambda *args: calls.update([name])

    for name, module in model.named_modules():
        if pick(module):
            module.register_forward_hook(hook(name))
    return calls


HOOKED = {
    "linears": lambda module: type(module) is torch.nn.Linear,
    "norms": lambda module: "Norm" in type(module).__name__,
    "attentions": lambda module: type(module).__name__.endswith("Attention"),
    "leaves": lambda module: not list(module.children()),
}


@pytest.mark.parametrize("pick", HOOKED)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_hooked_modules_are_called_once_and_kept(subject: Subject, pick: str) -> None:
    model, given = subject.model(), subject.inputs()
    calls = counted(model, HOOKED[pick])
    expected = output_of(model, given)
    author = Counter(calls)
    calls.clear()
    report = patch_model(model, PatchConfig(attention="exact"))
    output = output_of(model, given)
    assert relative(output, expected) < 1e-5
    assert {record.verdict for record in report.guard} == {"kept"}
    assert all(calls[name] <= author[name] for name in calls), calls - author
    calls.clear()
    output_of(model, given)
    assert calls + Counter() == calls and all(calls[name] <= author[name] for name in calls)


def test_what_a_hook_changes_reaches_the_output_and_both_sides_of_the_comparison() -> None:
    model = wan()
    for block in model.blocks:
        block.attn1.to_v.register_forward_hook(lambda module, given, made: made * 1.7)
        block.ffn.net[2].register_forward_hook(lambda module, given, made: made + 1)
    expected = run(model)
    report = patch_model(model, PatchConfig(attention="exact"))
    assert relative(run(model), expected) < 1e-5
    assert {record.verdict for record in report.guard} == {"kept"}


@pytest.mark.usefixtures("no_plans")
def test_a_wrong_attention_before_a_hooked_projection_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from turbo_rcm_patch import ops

    model = wan()
    for block in model.blocks:
        block.attn1.to_out[0].register_forward_hook(lambda *args: None)
    expected = run(model)
    right = ops.attention_skip
    monkeypatch.setattr(
        ops, "attention_skip", lambda q, k, v, *rest, **given: 0.5 * right(q, k, v, *rest, **given)
    )
    report = patch_model(model, PatchConfig(attention="exact", kinds=("self",)))
    assert relative(run(model), expected) < 1e-5
    assert report.fused == 0


def taylorseer(model: Any, steps: int = 6) -> list[torch.Tensor]:
    """A cache that keeps what Linears returned on some steps and extrapolates on others."""
    config = TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=2,
        max_order=1,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"blocks\.\d+\.attn1\.to_(q|k|v)$", r"blocks\.\d+\.attn2\.to_out\.0$"],
    )
    model.enable_cache(config)
    outputs = []
    for step in range(steps):
        given = CASES[0].inputs()
        given["hidden_states"] = given["hidden_states"] * (1 - 0.1 * step)
        with model.cache_context("cond"):
            outputs.append(run(model, **given))
    model.disable_cache()
    return outputs


def test_taylorseer_on_linears() -> None:
    expected = taylorseer(wan())
    model = wan()
    report = patch_model(model, PatchConfig(attention="exact"))
    for found, right in zip(taylorseer(model), expected, strict=True):
        assert relative(found, right) < 1e-4
    assert report.fused == 6


@pytest.mark.parametrize(
    "make",
    [wan, cogvideox.CASES[0].model, lambda: turbodiffusion.tiny(image=False)],
    ids=["wan", "cogvideox", "turbodiffusion"],
)
def test_the_random_state_is_as_it_was(make: Callable[[], Any]) -> None:
    model = make()
    given = {
        "WanTransformer3DModel": CASES[0].inputs,
        "CogVideoXTransformer3DModel": cogvideox.CASES[0].inputs,
    }.get(type(model).__name__, turbodiffusion.tiny_inputs)()
    patch_model(model)
    before = torch.get_rng_state()
    output_of(model, given)
    assert torch.equal(torch.get_rng_state(), before)


# --- what was checked, and what was not ----------------------------------------------------------


class Stop(KeyboardInterrupt):
    """Somebody pressed Ctrl-C."""


def checked(report: PatchReport) -> Counter[str]:
    return Counter(record.path for record in report.guard)


def test_an_interrupted_forward_leaves_the_rest_to_the_next() -> None:
    model = wan()
    report = patch_model(model, precision="fixed")

    def stop(*args: Any) -> None:
        raise Stop

    handle = model.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        run(model)
    assert len(report.guard) == 3
    assert "all kept" not in str(report.guard)
    assert "3 pairs have not been compared yet: blocks.1.attn1" in str(report.guard)
    handle.remove()
    run(model)
    assert checked(report) == Counter(pair.path for pair in report.pairs)
    assert "all kept" in str(report.guard)


def test_an_interrupted_pair_is_compared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbo_rcm_patch.patching import guard

    model = wan()
    report = patch_model(model, precision="fixed")
    right = guard.measure
    calls = 0

    def stop(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Stop
        return right(*args, **kwargs)

    monkeypatch.setattr(guard, "measure", stop)
    with pytest.raises(Stop):
        run(model)
    run(model)
    assert checked(report) == Counter(pair.path for pair in report.pairs)


def test_threads_do_not_use_up_each_other_s_check() -> None:
    """One thread stops in the middle of its first forward, while another runs one."""
    model = wan()
    report = patch_model(model)
    inside, done = threading.Event(), threading.Event()

    def wait(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(120)
            raise Stop

    handle = model.blocks[1].register_forward_pre_hook(wait)

    def other() -> None:
        with pytest.raises(Stop):
            run(model)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(120)
    run(model)
    done.set()
    thread.join()
    handle.remove()
    assert set(checked(report)) == {pair.path for pair in report.pairs}


def test_a_report_says_what_no_forward_showed() -> None:
    model = wan()
    with patched(model) as report:
        assert "no forward has been compared yet" in str(report)
        with torch.autocast("cpu", torch.bfloat16):
            run(model)
        assert len(report.guard) == 0 and "all kept" not in str(report)
        run(model)
        assert "all kept" in str(report)


def test_a_pair_that_never_runs_does_not_keep_the_others_from_their_last_step() -> None:
    """Nor does it have them compared on every step of a guided run."""
    model = wan()
    report = patch_model(model, precision="fixed")
    kept, model.blocks = model.blocks, torch.nn.ModuleList([model.blocks[0]])
    for step in range(4):
        for name in ("cond", "uncond"):
            with model.cache_context(name, step_index=step, num_inference_steps=4):
                run(model)
    model.blocks = kept
    found = [
        (record.step, record.when)
        for record in report.guard
        if record.path.endswith("attn1") and record.when != "middle"
    ]
    assert found == [(0, "first")] * 2 + [(3, "last")] * 2
    assert len(report.guard.unseen) == 3


def test_two_threads_that_compare_one_pair_take_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wan()
    patch_model(model, linear="int8", kinds=("feed-forward",), precision="auto", guard_budget=0.5)
    record: Any = record_of(model)
    both, own = threading.Barrier(2, timeout=120), Guard._measured
    started: set[int] = set()

    def together(self: Any, reference: Any, result: Any, pair: Any) -> Any:
        found, path = own(self, reference, result, pair), pair.states[0].pair.path
        wrong = pair.states[0].int8
        if path.startswith("blocks.0") and threading.get_ident() not in started:
            started.add(threading.get_ident())
            both.wait()
        return replace(found, error=1.0 if wrong else 0.0)

    monkeypatch.setattr(Guard, "_measured", together)
    threads = [threading.Thread(target=run, args=(model,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in record.plan.states:
        if state.pair.kind == "feed-forward":
            assert state.live and not state.int8 and state.precision == "as asked for"
