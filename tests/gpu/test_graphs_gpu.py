"""A patched forward as CUDA graphs on a GPU: the same bits, never stale, memory, and what fails.

The truth is the same model, patched without graphs, with the same changes made to it. Every model
takes a few plain forwards before it is captured.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig
from peft import LoraConfig
from torch import Tensor, nn

from tests.patching import cogvideox, wan_family
from tests.patching import turbodiffusion as turbo
from tests.patching.wan import CASES, Case, relative, run, wan
from turbo_rcm_patch import patch_model, refresh, report_of, unpatch_model
from turbo_rcm_patch.config import PatchOptions
from turbo_rcm_patch.patching.graphs import MOST_GRAPHS, WARM_UPS, GraphPool
from turbo_rcm_patch.patching.record import record_of

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
GPU = torch.device("cuda:0")
OPTIONS: dict[str, PatchOptions] = {
    "int8": {"guard": False},
    "exact": {"attention": "exact", "guard": False},
    "int8-linears": {"linear": "int8", "guard": False},
    "guard": {},
}
MIDDLE = Case(
    "middle", {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 4,
               "ffn_dim": 8960, "rope_max_seq_len": 128}, fused=12,
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(GPU)
    if isinstance(value, dict):
        return {name: on_gpu(part) for name, part in value.items()}
    return type(value)(map(on_gpu, value)) if isinstance(value, list | tuple) else value


def varied(given: dict[str, Any], seed: int) -> dict[str, Any]:
    """Another video and another prompt for every seed."""
    generator = torch.Generator().manual_seed(100 + seed)
    for name in ("hidden_states", "encoder_hidden_states"):
        noise = torch.randn(given[name].shape, generator=generator)
        given[name] = noise.to(given[name].dtype)
    return on_gpu(given)


def inputs(seed: int = 0, case: Any = CASES[0], batch: int = 1) -> dict[str, Any]:
    return varied(case.inputs(batch, dtype=BF16), seed)


def middle(seed: int = 0, frames: int = 9, side: int = 56) -> dict[str, Any]:
    given = CASES[0].inputs(dtype=BF16)
    given["hidden_states"] = torch.zeros(1, 4, frames, side, side, dtype=BF16)
    return varied(given, seed)


def pair(options: PatchOptions, case: Any = CASES[0]) -> tuple[Any, Any]:
    """A model with graphs and one without."""
    models = tuple(case.model(BF16).to(GPU) for _ in range(2))
    patch_model(models[0], cuda_graphs=True, **options)
    patch_model(models[1], **options)
    return models


def graphs_of(model: Any) -> Any:
    record = record_of(model)
    assert record is not None and record.graphs is not None
    return record.graphs


def replays(model: Any) -> int:
    return int(graphs_of(model)._replays)


def agree(one: Any, other: Any, make: Callable[[int], dict[str, Any]] = inputs) -> None:
    """They do on every forward, the last of which are replays."""
    before = replays(one)
    for seed in range(WARM_UPS + 5):
        given = make(seed)
        assert torch.equal(run(one, **given), run(other, **given)), (seed, report_of(one))
    assert replays(one) >= before + 3, report_of(one).cuda_graphs


def overwrite_free_memory() -> None:
    """NaN in what the allocator would hand out next."""
    torch.cuda.synchronize()
    held = [torch.full((1 << n,), float("nan"), device=GPU) for n in range(6, 22)]
    held += [torch.full((1 << 12,), float("nan"), device=GPU) for _ in range(64)]
    torch.cuda.synchronize()
    del held


# --- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_wan(case: Case, options: PatchOptions) -> None:
    one, other = pair(options, case)
    agree(one, other, lambda seed: inputs(seed, case, batch=2))
    assert report_of(one).last_forward == report_of(other).last_forward


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", cogvideox.CASES[:2], ids=lambda case: case.name)
def test_cogvideox(case: cogvideox.Case, options: PatchOptions) -> None:
    one, other = pair(options, case)
    agree(one, other, lambda seed: inputs(seed, case, batch=2))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_7056_tokens(options: PatchOptions) -> None:
    one, other = pair(options, MIDDLE)
    agree(one, other, middle)


@pytest.mark.parametrize("family", wan_family.FAMILIES, ids=lambda family: family.name)
def test_the_wan_family(family: wan_family.Family) -> None:
    """What cannot be captured is given up with a line, and every forward is right."""
    one, other = pair(OPTIONS["int8"], family)
    for seed in range(WARM_UPS + 4):
        given = varied(family.inputs(dtype=BF16), seed)
        assert torch.equal(run(one, **given), run(other, **given))
    (line,) = report_of(one).cuda_graphs
    print(family.name, line)
    # Four forwards follow the warm-up; the model may be looked at once more before the capture.
    assert replays(one) >= 3 or "Error" in line, line


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sla"])
def test_turbodiffusion(sparse: bool) -> None:
    models = []
    for _ in range(2):
        made = turbo.with_sparse(turbo.tiny()) if sparse else turbo.tiny()
        models.append(made.to(GPU))
    one, other = models
    patch_model(one, cuda_graphs=True, guard=False)
    patch_model(other, guard=False)
    given = on_gpu(turbo.tiny_inputs())
    with torch.no_grad():
        for seed in range(WARM_UPS + 4):
            again = given | {"x": given["x"] * (1 + seed)}
            assert torch.equal(one(**again), other(**again))
    (line,) = report_of(one).cuda_graphs
    print(line)
    assert replays(one) >= 3 or "Error" in line, line


def test_in_inference_mode_and_outside_of_it() -> None:
    one, other = pair(OPTIONS["int8-linears"])
    for seed in range(12):
        with torch.inference_mode(seed % 3 == 0), torch.no_grad():
            given = inputs(seed)
            mine, theirs = one(**given)[0], other(**given)[0]
            assert torch.equal(mine, theirs) and mine.is_inference() == theirs.is_inference()
    assert replays(one) > 5


def test_two_results_of_guidance_are_not_one() -> None:
    one, other = pair(OPTIONS["int8"])
    agree(one, other)
    cond, uncond = run(one, **inputs(1)), run(one, **inputs(2))
    assert torch.equal(cond, run(other, **inputs(1)))
    assert torch.equal(uncond, run(other, **inputs(2)))


def test_resolutions_and_prompts_take_turns() -> None:
    """Graphs share one pool of memory."""
    one, other = pair(OPTIONS["int8-linears"], MIDDLE)
    sizes = [(3, 16), (9, 56), (5, 32)]
    for seed in range(WARM_UPS + 4):
        for frames, side in sizes if seed % 2 else sizes[::-1]:
            given = middle(seed, frames, side)
            assert torch.equal(run(one, **given), run(other, **given)), (seed, frames, side)
            overwrite_free_memory()
    assert replays(one) >= 3 * 4


def test_more_resolutions_than_graphs() -> None:
    one, other = pair(OPTIONS["int8"])
    for _ in range(2):
        for text in range(1, MOST_GRAPHS + 3):
            for seed in range(WARM_UPS + 2):
                given = inputs(seed)
                given["encoder_hidden_states"] = torch.randn(1, 64 * text, 16, device=GPU).to(BF16)
                assert torch.equal(run(one, **given), run(other, **given))
    assert len(graphs_of(one)._captured) == MOST_GRAPHS


def test_another_stream_and_the_default_one() -> None:
    one, other = pair(OPTIONS["int8-linears"], MIDDLE)
    agree(one, other, middle)
    given, stream = [middle(seed) for seed in range(6)], torch.cuda.Stream()
    expected = [run(other, **some) for some in given]
    torch.cuda.synchronize()
    results = []
    for seed, some in enumerate(given):
        with torch.cuda.stream(stream if seed % 2 else torch.cuda.current_stream()):
            results.append(run(one, **some))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))


def test_two_threads() -> None:
    one, other = pair(OPTIONS["int8-linears"], MIDDLE)
    agree(one, other, middle)
    expected = [run(other, **middle(seed)) for seed in range(8)]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for seed in range(first, 8, 2):
                    given = middle(seed)
                    if not torch.equal(run(one, **given), expected[seed]):
                        wrong.append(seed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- never stale ---------------------------------------------------------------------------------


def add_lora(model: Any) -> None:
    torch.manual_seed(7)
    targets = ["to_q", "to_k", "to_out.0"]
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    )
    model.requires_grad_(False)
    model.to(GPU)


def write_in_place(model: Any) -> None:
    block = model.blocks[0] if hasattr(model, "blocks") else model.transformer_blocks[0]
    block.attn1.to_out[0].weight.data.mul_(1.5)
    with torch.no_grad():
        block.attn1.to_q.weight.neg_()


def replace(model: Any) -> None:
    block = model.blocks[0] if hasattr(model, "blocks") else model.transformer_blocks[0]
    for linear in (block.attn1.to_out[0], block.attn1.to_v):
        linear.weight = nn.Parameter(linear.weight.detach() * 1.5, requires_grad=False)
    overwrite_free_memory()  # Where the old ones lay.


def load_other_weights(model: Any) -> None:
    model.load_state_dict({name: x * 0.75 for name, x in model.state_dict().items()}, assign=True)
    overwrite_free_memory()


def there_and_back(model: Any) -> None:
    model.to("cpu")
    overwrite_free_memory()
    model.to(GPU)


@pytest.mark.parametrize("options", ["int8", "int8-linears"])
@pytest.mark.parametrize(
    "change", [add_lora, write_in_place, replace, load_other_weights, there_and_back]
)
@pytest.mark.parametrize("case", [CASES[0], cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_weights_of_today(case: Any, change: Callable[[Any], None], options: str) -> None:
    one, other = pair(OPTIONS[options], case)
    agree(one, other, lambda seed: inputs(seed, case))
    for model in (one, other):
        change(model)
    agree(one, other, lambda seed: inputs(seed, case))


def test_a_lora_of_another_scale() -> None:
    one, other = pair(OPTIONS["int8"])
    for model in (one, other):
        add_lora(model)
    agree(one, other)
    for scale in (0.25, 2.0):
        for model in (one, other):
            for part in model.modules():
                if hasattr(part, "set_scale"):
                    part.set_scale("default", scale)
        agree(one, other)


def test_a_scale_that_comes_with_the_call() -> None:
    one, other = pair(OPTIONS["int8"])
    for model in (one, other):
        add_lora(model)
    for scale in (0.5, 2.0):
        agree(one, other, lambda seed, s=scale: inputs(seed) | {"attention_kwargs": {"scale": s}})


def test_a_cache_that_comes_and_goes() -> None:
    one, other = pair(OPTIONS["int8"])
    agree(one, other)
    for model in (one, other):
        model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    before = replays(one)
    for seed in range(5):
        results = []
        for model in (one, other):
            with torch.no_grad(), model.cache_context("cond"):
                results.append(model(**inputs(seed))[0])
        assert torch.equal(*results)
    assert replays(one) == before and "is hooked" in report_of(one).cuda_graphs[0]
    for model in (one, other):
        model.disable_cache()
    agree(one, other)


def test_a_weight_that_waits_on_the_cpu() -> None:
    one, other = pair(OPTIONS["int8"])
    agree(one, other)
    for model in (one, other):
        model.scale_shift_table.data = model.scale_shift_table.data.cpu()
    before = replays(one)
    for seed in range(WARM_UPS + 2):
        given = inputs(seed)
        assert torch.equal(run(one, **given), run(other, **given))
    assert replays(one) == before
    assert "on cpu, its arguments on cuda:0" in report_of(one).cuda_graphs[0]
    for model in (one, other):
        model.to(GPU)
    agree(one, other)


# --- what fails ----------------------------------------------------------------------------------


def synchronise(x: Tensor, inplace: bool = False) -> Tensor:
    x.sum().item()
    return x * torch.sigmoid(x)


def raise_inside(x: Tensor, inplace: bool = False) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not in here")
    return x * torch.sigmoid(x)


@pytest.mark.parametrize("careless", [synchronise, raise_inside])
def test_a_capture_that_fails_leaves_everything_usable(
    careless: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, _ = pair(OPTIONS["int8"])
    one, other = pair(OPTIONS["int8"], MIDDLE)
    for _ in range(WARM_UPS + 2):
        run(good, **inputs())  # Its graphs are captured before, and replay after.
    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", careless)
        for seed in range(WARM_UPS + 3):
            given = middle(seed)
            assert torch.equal(run(one, **given), run(other, **given))
    (line,) = report_of(one).cuda_graphs
    assert replays(one) == 0 and "none" in line and "Error" in line, line
    # Random numbers are still drawn, and memory still comes and goes.
    torch.manual_seed(3)
    noise = torch.randn(1000, device=GPU)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(1000, device=GPU), noise)
    assert not torch.equal(torch.randn(1000, device=GPU), noise)
    reserved = torch.cuda.memory_reserved()
    big = torch.empty(1 << 29, dtype=torch.uint8, device=GPU)
    del big
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
    before = replays(good)
    run(good, **inputs())
    assert replays(good) == before + 1
    refresh(one)
    agree(one, other, middle)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # Somebody else's.
        doubled = noise * 2
    graph.replay()
    assert torch.equal(doubled, noise * 2)


def test_inside_somebody_elses_graph() -> None:
    one, other = pair(OPTIONS["int8-linears"])
    agree(one, other)
    given = inputs(5)
    expected = run(other, **given)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(one, **given)
    torch.cuda.synchronize()
    before = replays(one)
    with torch.cuda.graph(graph):
        result = run(one, **given)
    graph.replay()
    assert torch.equal(result, expected) and replays(one) == before
    agree(one, other)


# --- cost ----------------------------------------------------------------------------------------


def test_a_replay_waits_for_nothing() -> None:
    one, other = pair(OPTIONS["int8"])
    agree(one, other)
    given = inputs(3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = replays(one)
        run(one, **given)
        assert replays(one) == before + 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", ["int8", "int8-linears"])
def test_a_replay_takes_little_of_the_cpu(options: str) -> None:
    case = Case("deep", {"num_layers": 30})
    one, other = pair(OPTIONS[options], case)
    agree(one, other)
    given, least = inputs(3), {}
    for model in (one, other):
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(model, **given)
            times.append(time.perf_counter() - start)
        least[model is one] = 1e3 * min(times)
    print(f"ms of CPU time: {least[True]:.2f} as a graph, {least[False]:.2f} plain")
    assert least[True] < 0.5 * least[False]


def test_memory_goes_back_when_it_is_unpatched_refreshed_or_moved() -> None:
    model = MIDDLE.model(BF16).to(GPU)
    given = middle(frames=21)

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def captured() -> int:
        for _ in range(WARM_UPS + 2):
            run(model, **given)
        assert replays(model) > 0, report_of(model)
        return reserved()

    patch_model(model, cuda_graphs=True, guard=False)
    captured()  # Workspaces of libraries stay with their streams.
    unpatch_model(model)
    before = reserved()
    patch_model(model, cuda_graphs=True, guard=False)
    most = captured()
    assert most > before + (100 << 20), "a graph holds the memory of a forward"
    for give_back in (
        lambda: refresh(model),
        lambda: model.to("cpu").to(GPU),
        lambda: unpatch_model(model),
    ):
        give_back()
        assert reserved() < before + (32 << 20)
        if record_of(model) is not None:
            assert captured() < most + (32 << 20)


def test_a_copy_starts_without_graphs() -> None:
    one, other = pair(OPTIONS["int8-linears"])
    agree(one, other)
    twin = copy.deepcopy(one)
    assert replays(twin) == 0
    write_in_place(twin)
    agree(one, other)
    write_in_place(other)
    agree(twin, other)


# --- torch's own graphs --------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["int8", "exact", "int8-linears"])
@pytest.mark.parametrize("case", [CASES[0], cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_reduce_overhead_over_a_patched_model(
    case: Any, options: str, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._dynamo.utils import counters

    model = case.model(BF16).to(GPU)
    patch_model(model, **OPTIONS[options])
    plain = [run(model, **inputs(seed, case)) for seed in range(6)]
    fused = torch.compile(model, fullgraph=True)
    expected = [run(fused, **inputs(seed, case)) for seed in range(6)]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        result = run(compiled, **inputs(seed, case)).clone()
        assert torch.equal(result, expected[seed])
        assert relative(result, plain[seed]) < 0.02
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not [r.message for r in caplog.records if "cudagraph" in r.message.lower()]


def test_reduce_overhead_with_the_option_on() -> None:
    """A compiled forward captures itself; ours stays out of the way."""
    one, _ = pair(OPTIONS["int8"])
    compiled = torch.compile(one, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        run(compiled, **inputs(seed))
    assert replays(one) == 0
    unpatch_model(one)
    with torch.no_grad():
        assert one(**inputs())[0].isfinite().all()


def test_a_whole_model_of_many_blocks_after_others() -> None:
    """Pools of several models, patched and unpatched in turn."""
    for layers in (1, 3, 2):
        model = wan(num_layers=layers).to(GPU)
        other = wan(num_layers=layers).to(GPU)
        patch_model(model, cuda_graphs=True, guard=False)
        patch_model(other, guard=False)
        for seed in range(WARM_UPS + 3):
            given = {k: v.float() if torch.is_tensor(v) else v for k, v in inputs(seed).items()}
            assert torch.equal(run(model, **given), run(other, **given))
        assert replays(model) == 3
        unpatch_model(model)


def test_nothing_is_collected_inside_a_capture() -> None:
    """Garbage may hold another graph, whose end there makes the capture void."""
    pool, x, seen = GraphPool(GPU), torch.ones(4, device=GPU), []

    def forward() -> Tensor:
        seen.append(gc.isenabled())
        return x * 2

    graph, out = pool.capture(forward)
    assert seen == [True, False] and gc.isenabled()
    graph.replay()
    assert torch.equal(out, torch.full_like(x, 2.0))
