"""Faults that only a GPU shows: results under load from another stream, 200,000 tokens, and
`attention="sage"` over a whole network.

`pytest -m gpu tests/gpu/test_faults_gpu.py`
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.patching.wan import CASES, Case, relative, run
from turbo_rcm_patch import PatchConfig, ops, patched
from turbo_rcm_patch.ops.reference import exact_attention, split_heads

pytestmark = pytest.mark.gpu

HEADS, DIM = 3, 64
CHANNELS = HEADS * DIM
REPEATS = 100


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# --- the same bits under load --------------------------------------------------------------------


def calls() -> dict[str, Callable[[], Tensor]]:
    """Every family of kernels, over lengths that end inside a block."""
    batch, n = 2, 1_333
    q, k, v, x = (random(batch, n, CHANNELS) for _ in range(4))
    odd = [random(batch, n, 2 * 40) for _ in range(3)]  # portable kernels
    gate, weight, bias = random(batch, 1, CHANNELS), random(CHANNELS, CHANNELS), random(CHANNELS)
    norm, lengths = torch.rand(CHANNELS, device="cuda") + 0.5, torch.tensor([700, n]).cuda()
    angle = torch.rand(n, DIM // 2, device="cuda").repeat_interleave(2, -1)
    rotary = (angle.cos(), angle.sin())
    int8, scale = ops.quantize_weight(weight)
    eye, sparsity = torch.eye(DIM, device="cuda"), ops.Sparsity(topk=0.3)

    def spec(**options: Any) -> ops.AttentionSpec:
        return ops.AttentionSpec(heads=options.pop("heads", HEADS), **options)

    more = {"norm_q": norm, "norm_k": norm, "rotary": rotary}
    made: dict[str, Callable[[], Tensor]] = {
        "16-bit": lambda: ops.attention_skip(q, k, v, spec(pv="bf16"), residual=x, c_out=gate),
        "normed": lambda: ops.attention_skip(q, k, v, spec(pv="bf16"), **more),
        "lengths": lambda: ops.attention_skip(q, k, v, spec(pv="fp16"), kv_lengths=lengths),
        "causal": lambda: ops.attention_skip(q, k, v, spec(pv="bf16", causal=True)),
        "portable": lambda: ops.attention_skip(*odd, spec(heads=2, pv="bf16")),
        "logsumexp": lambda: ops.attention_lse(q, k, v, spec(pv="bf16"))[1],
        "one launch": lambda: ops.attention_project_skip(
            q, k, v, weight, bias, spec(pv="bf16"), residual=x, form="one-launch"
        ),
        "two launches": lambda: ops.attention_project_skip(
            q, k, v, weight, bias, spec(pv="bf16"), residual=x, c_out=gate, form="two-launch"
        ),
        "sparse": lambda: ops.sparse_linear_attention(
            q, k, v, eye, None, spec(pv="bf16"), sparsity
        ),
        "projection": lambda: ops.project_skip(x, weight, bias, residual=x, c_out=gate),
        "int8 linear": lambda: ops.int8_linear(x, int8, scale, bias, residual=x),
        "norm": lambda: ops.norm_modulate(x, scale=gate, shift=gate),
        "rows": lambda: ops.norm_modulate_rows(x, scale=gate).int8,
        "skip": lambda: ops.skip(x, q, 0.5, gate),
    }
    if ops.resolve_pv("auto", torch.device("cuda", torch.cuda.current_device())) == "fp8":
        made |= {
            "fp8": lambda: ops.attention_skip(q, k, v, spec(pv="fp8"), **more),
            "fp8 portable": lambda: ops.attention_skip(*odd, spec(heads=2, pv="fp8")),
            "fp8 sparse": lambda: ops.sparse_linear_attention(
                q, k, v, eye, None, spec(pv="fp8"), sparsity
            ),
        }
    return made


def test_a_hundred_repeats_give_the_same_bits_under_load() -> None:
    """Another stream multiplies matrices and fills memory with NaN meanwhile."""
    made = calls()
    expected = {name: call().clone() for name, call in made.items()}
    assert all(bool(x.float().isfinite().all()) for x in expected.values())
    busy, side = torch.randn(3000, 3000, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    wrong: dict[str, Tensor] = {
        name: torch.zeros((), dtype=torch.int64, device="cuda") for name in made
    }
    for repeat in range(REPEATS):
        with torch.cuda.stream(side):
            busy @ busy
            torch.empty(1 << (12 + repeat % 10), device="cuda").fill_(float("nan"))
        for name, call in made.items():
            wrong[name] += (call() != expected[name]).sum()
    torch.cuda.synchronize()
    assert {name: int(n) for name, n in wrong.items() if int(n)} == {}


def test_two_streams_that_run_the_same_operations() -> None:
    made = calls()
    expected = {name: call().clone() for name, call in made.items()}
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs += [(name, call()) for name, call in made.items()]
    torch.cuda.synchronize()
    assert {name for name, out in outs if not torch.equal(out, expected[name])} == set()


# --- long sequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [65_537, 131_071, 200_003])
@pytest.mark.parametrize("dim", [64, 40, 128])  # 40: portable kernels
@pytest.mark.parametrize("pv", ["bf16", "fp8"])
def test_long_sequences_against_exact_attention(n: int, dim: int, pv: Any) -> None:
    """All rows are computed, the first, the last and some between are compared with fp64. What is
    seen of a strided v ends beyond 2^31 bytes."""
    if pv == "fp8" and ops.resolve_pv("auto", torch.device("cuda", 0)) != "fp8":
        pytest.skip("this GPU has no e4m3 matrix units")
    wide = random(1, n, 3 * 2 * dim)
    q, k, v = wide.chunk(3, -1)
    out = ops.attention_skip(q, k, v, ops.AttentionSpec(heads=2, pv=pv))
    assert bool(out.isfinite().all())
    rows = torch.cat(
        [torch.arange(64), torch.arange(n // 2, n // 2 + 64), torch.arange(n - 64, n)]
    )
    qh, kh, vh = (split_heads(x.contiguous(), 2).double() for x in (q[:, rows.cuda()], k, v))
    truth = torch.cat(
        [exact_attention(qh[:, h : h + 1], kh[:, h : h + 1], vh[:, h : h + 1],
                         sm_scale=dim**-0.5)[0] for h in range(2)], 1
    ).transpose(1, 2).flatten(2)  # fmt: skip
    ours = out[:, rows.cuda()]
    for part in (slice(0, 64), slice(64, 128), slice(128, 192)):
        assert relative(ours[:, part].cpu(), truth[:, part].cpu()) < 0.12


def test_offsets_that_pass_32_bits() -> None:
    """200,000 tokens of 12,288 channels are 2.5e9 elements: only an int64 reaches the last ones.
    One kernel of each family, compared over the last rows."""
    free, _ = torch.cuda.mem_get_info()
    n, channels = 200_000, 12_288
    if free < 6 * 2 * n * channels:
        pytest.skip("too little free memory")
    x = torch.empty(1, n, channels, dtype=torch.bfloat16, device="cuda").normal_()
    gate, last = random(1, 1, channels), slice(n - 300, n)
    for run_it in (
        lambda s: ops.skip(x[:, s], x[:, s], 0.5, gate),
        lambda s: ops.norm_modulate(x[:, s], scale=gate, shift=gate),
        lambda s: ops.norm_modulate_rows(x[:, s], scale=gate).int8,
    ):
        assert torch.equal(run_it(slice(None))[:, last], run_it(last))
    # The last 32 heads of 96: their q, k and v begin beyond 2^31 elements of nothing dense.
    part = x[:, :, -64:]
    spec = ops.AttentionSpec(heads=1, pv="bf16")
    dense = part.contiguous()
    assert torch.equal(
        ops.attention_skip(part, part, part, spec)[:, last],
        ops.attention_skip(dense, dense, dense, spec)[:, last],
    )


# --- sage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [False, True], ids=["t2v", "i2v"])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
def test_sage_over_a_whole_network(image: bool, linear: Any) -> None:
    """Every pair runs with the package's attention, and the guard keeps it."""
    if find_spec("sageattention") is None:
        pytest.skip("sageattention is not installed")
    case = Case("sage", image=image)
    model = case.model().cuda().bfloat16()

    def there(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.cuda() if name == "timestep" else x.to("cuda", torch.bfloat16)

    # 12 x 8 x 10 latents are 16 * 16 * 3 tokens: keys that divide by 64, as release 1 needs.
    given = case.inputs()
    generator = torch.Generator().manual_seed(1)
    given["hidden_states"] = torch.randn(1, 4, 3, 32, 32, generator=generator)
    if not image:
        given["encoder_hidden_states"] = torch.randn(1, 512, 16, generator=generator)
    else:
        given["encoder_hidden_states_image"] = torch.randn(1, 64, 16, generator=generator)
    given = {name: there(name, x) for name, x in given.items()}
    expected = run(model, **given)
    with patched(model, PatchConfig(attention="sage", linear=linear)) as report:
        out = run(model, **given)
        again = run(model, **given)
        ran = report.last_forward
    assert torch.equal(out, again)
    assert relative(out.float().cpu(), expected.float().cpu()) < 0.05
    assert any("sage" in how for how in ran), ran
    assert {record.verdict for record in report.guard} == {"kept"}
    assert torch.equal(run(model, **given), expected)


def test_what_sage_cannot_run_is_refused_by_name() -> None:
    if find_spec("sageattention") is None:
        pytest.skip("sageattention is not installed")
    from turbo_rcm_patch.errors import TurboRCMError

    case = CASES[-1]  # three heads of 24
    model = case.model().cuda().bfloat16()
    with pytest.raises(TurboRCMError, match="head_dim"), patched(model, attention="sage"):
        run(model, **{
            name: x.cuda() if name == "timestep" else x.to("cuda", torch.bfloat16)
            if isinstance(x, Tensor) else x
            for name, x in case.inputs().items()
        })  # fmt: skip
