"""Random calls of the public operations against `oracle`.

On a GPU the kernels are also compared with the emulation, which is far tighter than fp64 where
something is quantised, and called again over the same bits elsewhere in memory, which has to give
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import oracle
from tests.fuzz.draw import EPS, Draw, Mismatch, close_to, named, same_bits
from turbo_rcm_patch import ops, sageattn

__all__ = ["OPERATIONS", "run_operation"]

#: Largest error of a row with int8 (int4) q and k against the contract in fp64, by the type of P:
#: single values land on the other side of a rounding boundary.
TIGHT = {"fp8": 2e-2, "bf16": 4e-3, "fp16": 4e-3}
#: The whole sample against exact mathematics, where logits are about N(0, 1).
LOOSE = {"fp8": 0.10, "bf16": 0.05, "fp16": 0.05}
HEAD_DIMS = (7, 8, 16, 24, 32, 40, 64, 72, 80, 96, 128)


def _spec(d: Draw, heads: int, dim: int, **fixed: Any) -> ops.AttentionSpec:
    given: dict[str, Any] = {
        "attention": d.of("int8", "int8", "int8", "exact", "int4"),
        "pv": d.of("auto", "bf16", "fp16", "fp8"),
        "smooth_k": d.maybe(0.8),
        "causal": d.maybe(0.25),
        "sm_scale": d.value.choice([None, None, None, 0.7 * dim**-0.5, -(dim**-0.5), 0.0]),
        "eps": d.value.choice([1e-6, 1e-5]),
    }
    return ops.AttentionSpec(heads=heads, **given | fixed)


class _Attention:
    """An attention's arguments and its branch in fp64."""

    def __init__(self, d: Draw, most: int = 300, **fixed: Any) -> None:
        self.d = d
        self.heads, self.dim = d.of(1, 2, 3), d.of(*HEAD_DIMS)
        if fixed.pop("aligned", False):
            self.dim = d.of(16, 32, 64, 96, 128)
        self.dtype = d.dtype()
        self.batch, self.n_q = d.value.randint(1, 3), d.length(most)
        channels = self.heads * self.dim
        self.shape = (self.batch, self.n_q, channels)
        self.rotary = None
        turns = self.dim % 2 == 0 and d.maybe(0.4)
        self.n_kv = self.n_q if turns or d.maybe(0.3) else d.length(most)
        if turns:
            angle = torch.rand(self.n_q, self.dim // 2, device=d.device, generator=d.generator)
            angle = (6 * angle).repeat_interleave(2, -1)
            table = d.of(torch.float32, torch.float32, torch.float64)
            shape = (1, self.n_q, 1, self.dim) if d.maybe() else (self.n_q, self.dim)
            self.rotary = (d.keep(angle.cos().to(table).view(shape)),
                           d.keep(angle.sin().to(table).view(shape)))  # fmt: skip
        self.spec = _spec(d, self.heads, self.dim, **fixed)
        of_kv = (self.batch, self.n_kv, channels)
        self.q = d.laid_out(*self.shape, dtype=self.dtype)
        self.k = d.laid_out(*of_kv, dtype=self.dtype)
        self.v = d.laid_out(*of_kv, dtype=self.dtype)
        self.norms: dict[str, Tensor] = {}
        self.lengths: Tensor | None = None

    def norm(self, layer: bool = True) -> None:
        kind = self.d.of("none", "across", "head", "layer" if layer else "head")
        if kind == "none":
            return
        size = self.heads * self.dim if kind == "across" else self.dim
        for name in ("norm_q", "norm_k"):
            self.norms[name] = self.d.positive(size, dtype=self.d.of(self.dtype, torch.float32))
            if kind == "layer":
                bias = self.d.noise(size, dtype=self.dtype, size=0.3)
                self.norms[f"{name}_bias"] = bias

    def padding(self) -> None:
        """Lengths of keys, and NaN past them."""
        if not self.d.maybe(0.3):
            return
        self.lengths = self.d.lengths(self.batch, self.n_kv)
        for b, n in enumerate(self.lengths.tolist()):
            for x in (self.k, self.v):
                x[b, n:] = float("nan")
        self.d.inputs = [(x, x.clone()) for x, _ in self.d.inputs]

    @property
    def pv(self) -> str:
        return ops.resolve_pv(self.spec.pv, self.d.device, self.n_kv)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """q, k, v, what is seen, and the factor on logits."""
        given = self.norms
        q, k = (
            oracle.prepared(x, self.heads, given.get(f"norm_{name}"),
                            given.get(f"norm_{name}_bias"), self.rotary, self.spec.eps)
            for name, x in (("q", self.q), ("k", self.k))
        )  # fmt: skip
        scale = self.dim**-0.5 if self.spec.sm_scale is None else self.spec.sm_scale
        seen = oracle.seen_keys(q, k, self.lengths, self.spec.causal)
        return q, k, oracle.heads_of(self.v, self.heads), seen, scale

    def branch(self, *, exact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The attention [B, Nq, H*D] as it should be computed here, its logsumexp [B, H, Nq], and
        the size of what it added up."""
        q, k, v, seen, scale = self.parts()
        out, lse = oracle.attention(q, k, v, scale, seen)
        size, _ = oracle.attention(q, k, v.abs(), scale, seen)
        if not exact and self.spec.attention in ("int8", "int4"):
            qmax = 127 if self.spec.attention == "int8" else 7
            truth = out
            out = oracle.contract(
                q, k, v, scale, seen, pv=self.pv, qmax=qmax, smooth=self.spec.smooth_k,
                lengths=self.lengths,
            )  # fmt: skip
            if qmax == 127 and not self.norms and self.spec.smooth_k:
                close_to("the contract", out.flatten(1), truth.flatten(1), size.flatten(1),
                         budget=LOOSE[self.pv])  # fmt: skip
        merged = (x.transpose(1, 2).flatten(2) for x in (out, size))
        out, size = merged
        return out, lse, size

    @property
    def budget(self) -> float:
        """Of one row of a branch."""
        if self.spec.attention == "exact":
            return 16 * EPS[self.dtype] + 4e-6
        return TIGHT[self.pv] * (4 if self.spec.attention == "int4" else 1)

    @property
    def given(self) -> dict[str, Any]:
        return {**self.norms, "rotary": self.rotary, "kv_lengths": self.lengths}

    def __str__(self) -> str:
        return named(q=self.q, k=self.k, strides=self.q.stride(), **self.given) + f" {self.spec}"


def _gradients(
    d: Draw, what: str, run: Callable[..., Any], truth: Callable[..., Any],
    leaves: list[Tensor], budget: float, size: Callable[..., Tensor] | None = None,
) -> None:  # fmt: skip
    """Compare gradients of a random sum of the results with those of fp64; `size` has gradients
    as large as their terms, where these may cancel."""
    ours = [x.detach().clone().requires_grad_() for x in leaves]
    wide = [x.detach().double().clone().requires_grad_() for x in leaves]
    outs, expected = run(*ours), truth(*wide)
    outs, expected = (x if isinstance(x, tuple) else (x,) for x in (outs, expected))
    weights = [
        torch.randn(out.shape, generator=d.generator, device=d.device).to(out.dtype)
        for out in outs
    ]
    sum((out.double() * w.double()).sum() for out, w in zip(outs, weights, strict=True)).backward()
    sum((out * w.double()).sum() for out, w in zip(expected, weights, strict=True)).backward()
    terms = [x.detach().abs().requires_grad_() for x in wide]
    if size is not None:
        (size(*terms) * weights[0].double().abs()).sum().backward()
    for index, (a, b, term) in enumerate(zip(ours, wide, terms, strict=True)):
        if (a.grad is None) != (b.grad is None):
            raise Mismatch(f"{what}: gradient {index} is {a.grad is not None} there")
        if a.grad is not None and b.grad is not None:
            close_to(f"{what}: gradient {index}", a.grad.flatten(), b.grad.flatten(),
                     None if term.grad is None else term.grad.flatten(),
                     budget=budget + 2 * EPS[a.dtype])  # fmt: skip


def _twice(d: Draw, what: str, run: Callable[[], Any]) -> Any:
    """The result; on a GPU the second of two calls, which have to agree: kernels that were
    started once are started again directly."""
    out = run()
    if d.device.type == "cuda":
        again = run()
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (out, again)), strict=True):
            if not same_bits(a, b):
                raise Mismatch(f"{what}: a second call gave other bits")
    return out


def _skip_budget(d: Draw, dtype: torch.dtype, cast: str) -> float:
    return (6 if cast == "model" else 1.02) * EPS[dtype] + 2e-6


# --- operations ----------------------------------------------------------------------------------


def attention_skip(d: Draw) -> str:
    a = _Attention(d)
    a.norm()
    a.padding()
    residual = d.laid_out(*a.shape, dtype=d.dtype()) if d.maybe(0.6) else None
    c_skip = d.coefficient(*a.shape) if residual is not None else 1.0
    c_out, out_dtype = d.coefficient(*a.shape), d.of(None, torch.float32, torch.bfloat16)
    given = a.given | {"residual": residual, "c_skip": c_skip, "c_out": c_out}
    out = _twice(d, str(a), lambda: ops.attention_skip(a.q, a.k, a.v, a.spec, **given,
                                                       out_dtype=out_dtype))  # fmt: skip
    branch, _, size = a.branch()
    expected = oracle.close(residual, branch, c_skip, c_out)
    wide = oracle.close(
        None if residual is None else residual.abs(), size,
        c_skip.abs() if isinstance(c_skip, Tensor) else abs(c_skip),
        c_out.abs() if isinstance(c_out, Tensor) else abs(c_out),
    )  # fmt: skip
    if out.dtype != (out_dtype or a.dtype):
        raise Mismatch(f"{out.dtype}")
    budget = a.budget + EPS[out.dtype]
    close_to(str(a), out, expected, wide, budget=budget)
    seen = a.parts()[3].any(-1).squeeze(1)
    if residual is None and bool(out[~seen].any()):
        raise Mismatch(f"{a}: a query without a key is not 0")
    if d.value.random() < 0.25 and a.lengths is None and a.n_q * a.n_kv < 20_000:
        leaves = [a.q, a.k, a.v] + ([] if residual is None else [residual])

        def ours(q: Tensor, k: Tensor, v: Tensor, r: Tensor | None = None) -> Tensor:
            return ops.attention_skip(q, k, v, a.spec, **given | {"residual": r})

        def truth(q: Tensor, k: Tensor, v: Tensor, r: Tensor | None = None) -> Tensor:
            held = a.q, a.k, a.v
            a.q, a.k, a.v = q, k, v
            made = oracle.close(r, a.branch(exact=True)[0], c_skip, c_out)
            a.q, a.k, a.v = held
            return made

        _gradients(d, str(a), ours, truth, leaves, 40 * EPS[a.dtype] + 1e-4)
    return str(a)


def attention_lse(d: Draw) -> str:
    a = _Attention(d)
    a.norm()
    a.padding()
    out, lse = _twice(d, str(a), lambda: ops.attention_lse(a.q, a.k, a.v, a.spec, **a.given))
    branch, expected, size = a.branch()
    close_to(str(a), out, branch, size, budget=a.budget + EPS[out.dtype])
    if not torch.equal(lse == -math.inf, expected == -math.inf):
        raise Mismatch(f"{a}: other rows see no key")
    error = torch.where(expected.isfinite(), lse.double() - expected, 0.0).abs()
    least = {"exact": 1e-4 + 16 * EPS[a.dtype], "int8": 0.15, "int4": 3.0}[a.spec.attention]
    if float(error.max()) > least * (1 if not a.norms else 2):
        raise Mismatch(f"{a}: logsumexp is off by {float(error.max()):.3g}")
    return str(a)


def masked_attention(d: Draw) -> str:
    a = _Attention(d, most=120, causal=False)
    full = (a.batch, a.heads, a.n_q, a.n_kv)
    shape = tuple(d.value.choice([1, n]) for n in full[:3]) + (d.value.choice([1, *3 * [a.n_kv]]),)
    if d.maybe():
        mask = torch.rand(shape, generator=d.generator, device=d.device) > 0.3
        mask[..., 0] = True
        added = torch.zeros(shape, device=d.device).masked_fill(~mask, -math.inf)
    else:
        mask = added = torch.randn(shape, generator=d.generator, device=d.device).to(a.dtype)
    mask = d.keep(mask)
    out = ops.masked_attention(a.q, a.k, a.v, mask, a.spec, rotary=a.rotary)
    q, k, v, _, scale = a.parts()
    p = (scale * (q @ k.mT) + added.double()).softmax(-1)
    merged = ((p @ x).transpose(1, 2).flatten(2) for x in (v, v.abs()))
    expected, size = merged
    close_to(f"{a} {named(mask=mask)}", out, expected, size, budget=24 * EPS[a.dtype] + 4e-6)
    return str(a)


def attention_project_skip(d: Draw) -> str:
    form = d.of("auto", "two-launch", "one-launch", "one-launch")
    fixed = {} if form != "one-launch" else {"attention": d.of("int8", "int8", "int4")}
    a = _Attention(d, **fixed)
    a.norm()
    a.padding()
    channels = a.shape[2]
    features = d.of(channels, 8, 48, 130)
    weight = d.noise(features, channels, dtype=a.dtype, size=channels**-0.5)
    bias = d.noise(features, dtype=d.of(a.dtype, torch.float32)) if d.maybe(0.7) else None
    shape = (a.batch, a.n_q, features)
    residual = d.laid_out(*shape, dtype=d.of(a.dtype, torch.float32)) if d.maybe(0.8) else None
    c_skip = d.coefficient(*shape) if residual is not None else 1.0
    c_out, cast = d.coefficient(*shape), d.of("fp32", "fp32", "model")
    given = a.given | {"residual": residual, "c_skip": c_skip, "c_out": c_out, "cast": cast}
    what = f"{a} form={form} {named(weight=weight, bias=bias, residual=residual, cast=cast)}"
    out = _twice(d, what, lambda: ops.attention_project_skip(
        a.q, a.k, a.v, weight, bias, a.spec, form=form, **given))  # fmt: skip
    branch, _, size = a.branch()
    expected = oracle.close(residual, oracle.linear(branch, weight, bias), c_skip, c_out)
    wide = _absolute(oracle.linear(size, weight.abs(), _abs(bias)), residual, c_skip, c_out)
    rounded = EPS[a.dtype] * 2 + _skip_budget(d, out.dtype, cast)
    close_to(what, out, expected, wide, budget=a.budget + rounded)
    return what


def _abs(x: Any) -> Any:
    return abs(x) if isinstance(x, float) else x.abs() if isinstance(x, Tensor) else None


def _absolute(branch: Tensor, residual: Tensor | None, c_skip: Any, c_out: Any) -> Tensor:
    return oracle.close(_abs(residual), branch, _abs(c_skip), _abs(c_out))


def _linear_shape(d: Draw) -> tuple[int, int, int, int, torch.dtype]:
    channels, features = d.of(1, 16, 33, 64, 130, 256), d.of(1, 16, 48, 65, 130, 200)
    return d.value.randint(1, 3), d.length(130), channels, features, d.dtype()


def project_skip(d: Draw) -> str:
    batch, n, channels, features, dtype = _linear_shape(d)
    x = d.laid_out(batch, n, channels, dtype=dtype)
    weight = d.noise(features, channels, dtype=dtype, size=channels**-0.5)
    bias = d.noise(features, dtype=d.of(dtype, torch.float32)) if d.maybe(0.7) else None
    shape = (batch, n, features)
    residual = d.laid_out(*shape, dtype=d.dtype()) if d.maybe(0.8) else None
    c_skip = d.coefficient(*shape) if residual is not None else 1.0
    c_out, cast = d.coefficient(*shape), d.of("fp32", "model")
    out_dtype = d.of(None, torch.float32)
    given: dict[str, Any] = {"c_skip": c_skip, "c_out": c_out, "cast": cast}
    what = named(x=x, weight=weight, bias=bias, residual=residual, out_dtype=out_dtype, **given)
    out = _twice(d, what, lambda: ops.project_skip(
        x, weight, bias, residual=residual, out_dtype=out_dtype, **given))  # fmt: skip
    expected = oracle.close(residual, oracle.linear(x, weight, bias), c_skip, c_out)
    size = oracle.linear(x.abs(), weight.abs(), _abs(bias))
    wide = _absolute(size, residual, c_skip, c_out)
    step = max(EPS[residual.dtype if residual is not None else out.dtype], EPS[out.dtype])
    budget = (4 if cast == "model" else 1.02) * step + 2 * EPS[dtype] + 2e-6
    close_to(what, out, expected, wide, budget=budget)
    if d.value.random() < 0.3:
        leaves = [x, weight] + ([] if residual is None else [residual])
        _gradients(
            d, what,
            lambda x, w, r=None: ops.project_skip(x, w, bias, residual=r, **given),
            lambda x, w, r=None: oracle.close(r, oracle.linear(x, w, bias), c_skip, c_out),
            leaves, 8 * EPS[dtype] + (4 * step if cast == "model" else 0) + 1e-5,
        )  # fmt: skip
    return what


def skip(d: Draw) -> str:
    batch, n, channels = d.value.randint(1, 3), d.length(130), d.of(1, 16, 33, 130, 256)
    residual = d.laid_out(batch, n, channels, dtype=d.dtype())
    branch = d.laid_out(batch, n, channels, dtype=d.dtype())
    c_skip, c_out = (d.coefficient(batch, n, channels) for _ in range(2))
    cast, out_dtype = d.of("fp32", "model"), d.of(None, torch.float32)
    given: dict[str, Any] = {"cast": cast, "out_dtype": out_dtype}
    what = named(residual=residual, branch=branch, c_skip=c_skip, c_out=c_out, **given)
    out = _twice(d, what, lambda: ops.skip(residual, branch, c_skip, c_out, **given))
    expected = oracle.close(residual, branch, c_skip, c_out)
    wide = _absolute(branch.abs(), residual, c_skip, c_out)
    steps = 4 * EPS[residual.dtype] if cast == "model" else 0.0
    close_to(what, out, expected, wide, budget=1.02 * EPS[out.dtype] + steps + 1e-6)
    if d.value.random() < 0.3 and cast == "fp32":
        _gradients(
            d, what, lambda r, b: ops.skip(r, b, c_skip, c_out, **given),
            lambda r, b: oracle.close(r, b, c_skip, c_out), [residual, branch],
            2 * max(EPS[residual.dtype], EPS[branch.dtype]) + 1e-5,
        )  # fmt: skip
    return what


def _modulation(d: Draw, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    batch, n, channels = x.shape
    shapes = d.of((1,), (batch, 1, channels), (batch, n, channels), (channels,), (1, 1, channels))
    if shapes == (1,):
        return None, None
    kind = d.of(torch.float32, x.dtype)
    made = [d.noise(*shapes, dtype=kind) if d.maybe(0.85) else None for _ in range(2)]
    return made[0], made[1]


def _of_kind(d: Draw, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """scale and shift whose shapes follow x, and whose presence is compiled for."""
    kind = d.of("none", "sample", "element", "row", "channel")
    if kind == "none":
        return None, None
    batch, n, channels = x.shape
    shape = {"sample": (batch, 1, channels), "element": (batch, n, channels),
             "row": (channels,), "channel": (1, 1, channels)}[kind]  # fmt: skip
    dtype = d.of(torch.float32, x.dtype)
    made = [d.noise(*shape, dtype=dtype) if d.maybe(0.85) else None for _ in range(2)]
    return made[0], made[1]


def norm_modulate(d: Draw) -> str:
    x = d.laid_out(d.value.randint(1, 3), d.length(130), d.of(2, 16, 33, 130, 256, 384),
                   dtype=d.dtype())  # fmt: skip
    scale, shift = _of_kind(d, x)
    form, eps = d.of("modulation", "affine"), d.value.choice([1e-6, 1e-5])
    given: dict[str, Any] = {"form": form, "eps": eps}
    what = named(x=x, scale=scale, shift=shift, **given)
    out = _twice(d, what, lambda: ops.norm_modulate(x, scale=scale, shift=shift, **given))
    one = 1.0 if form == "modulation" else 0.0
    expected = oracle.layer_norm(x, scale, shift, one, eps)
    size = oracle.layer_norm(x, scale, None, one, eps).abs() + (
        0.0 if shift is None else shift.double().abs()
    )
    budget = 1.02 * EPS[out.dtype] + 2e-5
    # Two channels may cancel down to the rounding of their mean, which is that of the larger one.
    wide = x.double()
    spread = (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    factor = 1.0 if scale is None else (one + scale.double()).abs()
    mean = 2 * EPS[torch.float32] * wide.abs().amax(-1, keepdim=True) * spread * factor
    close_to(what, out, expected, size + 0.05 + mean / budget, budget=budget)
    if d.value.random() < 0.3 and scale is not None and shift is not None and x.shape[2] > 2:
        _gradients(
            d, what,
            lambda x, a, b: ops.norm_modulate(x, scale=a, shift=b, **given),
            lambda x, a, b: oracle.layer_norm(x, a, b, one, eps), [x, scale, shift],
            4 * max(EPS[x.dtype], EPS[scale.dtype]) + 1e-3,
        )  # fmt: skip
    return what


def norm_modulate_rows(d: Draw) -> str:
    x = d.laid_out(d.value.randint(1, 3), d.length(130), d.of(16, 33, 130, 256), dtype=d.dtype())
    scale, shift = _of_kind(d, x)
    form = d.of("modulation", "affine")
    what = named(x=x, scale=scale, shift=shift, form=form)
    rows = _twice(
        d, what, lambda: tuple(ops.norm_modulate_rows(x, scale=scale, shift=shift, form=form))
    )
    expected = oracle.layer_norm(x, scale, shift, 1.0 if form == "modulation" else 0.0, 1e-6)
    _check_rows(what, *rows, expected)
    return what


def _check_rows(what: str, int8: Tensor, scale: Tensor, expected: Tensor) -> None:
    channels = expected.shape[-1]
    padded = -(-channels // 16) * 16
    if int8.shape != (*expected.shape[:-1], padded) or bool(int8[..., channels:].any()):
        raise Mismatch(f"{what}: rows {list(int8.shape)}, or their padding is not 0")
    amax = expected.abs().amax(-1)
    loud = amax > 1e-3
    if float(((scale.double() * 127 / amax)[loud] - 1).abs().max() if loud.any() else 0) > 1e-3:
        raise Mismatch(f"{what}: scales")
    steps = int8[..., :channels].double() - expected / scale.double()[..., None]
    if float(steps[loud].abs().max() if loud.any() else 0) > 0.52:
        raise Mismatch(f"{what}: rounded by {float(steps.abs().max()):.3g} of a step")


def linear_gelu(d: Draw) -> str:
    batch, n, channels, features, dtype = _linear_shape(d)
    x = d.laid_out(batch, n, channels, dtype=dtype)
    weight = d.noise(features, channels, dtype=dtype, size=channels**-0.5)
    bias = d.noise(features, dtype=d.of(dtype, torch.float32))
    what = named(x=x, weight=weight, bias=bias)
    out = ops.linear_gelu(x, weight, bias)

    def truth(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = oracle.linear(x, w, b)
        return 0.5 * y * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3)))

    size = oracle.linear(x.abs(), weight.abs(), bias.abs())
    close_to(what, out, truth(x, weight, bias), size, budget=5 * EPS[dtype] + 2e-6)
    if d.value.random() < 0.3:
        # The derivative of GELU is 0 somewhere, and there all terms cancel.
        _gradients(d, what, ops.linear_gelu, truth, [x, weight, bias], 16 * EPS[dtype] + 1e-5,
                   size=oracle.linear)  # fmt: skip
    return what


def _streams(d: Draw, channels: int, dtype: torch.dtype) -> list[Tensor]:
    batch = d.value.randint(1, 3)
    count = d.of(1, 2, 2, 3)
    return [d.laid_out(batch, d.length(70), channels, dtype=dtype) for _ in range(count)]


def norm_modulate_streams(d: Draw) -> str:
    streams = _streams(d, d.of(16, 33, 130), d.dtype())
    shape = (len(streams[0]), 1, streams[0].shape[2])
    kind = d.of(torch.float32, streams[0].dtype)
    scale, shift = ([d.noise(*shape, dtype=kind) for _ in streams] for _ in range(2))
    form = d.of("modulation", "affine")
    what = named(streams=streams, scale=scale, form=form)
    out = _twice(
        d, what, lambda: ops.norm_modulate_streams(streams, scale=scale, shift=shift, form=form)
    )
    one = 1.0 if form == "modulation" else 0.0
    parts = list(zip(streams, scale, shift, strict=True))
    expected = torch.cat([oracle.layer_norm(*part, one, 1e-6) for part in parts], 1)
    size = [oracle.layer_norm(x, a, None, one, 1e-6).abs() + b.double().abs() for x, a, b in parts]
    close_to(what, out, expected, torch.cat(size, 1), budget=1.02 * EPS[out.dtype] + 2e-5)
    return what


def project_skip_streams(d: Draw) -> str:
    channels, features, dtype = d.of(16, 33, 130), d.of(16, 48, 65), d.dtype()
    residuals = _streams(d, features, d.of(dtype, torch.float32))
    batch, lengths = len(residuals[0]), [r.shape[1] for r in residuals]
    x = d.laid_out(batch, sum(lengths), channels, dtype=dtype)
    weight = d.noise(features, channels, dtype=dtype, size=channels**-0.5)
    bias = d.noise(features, dtype=dtype) if d.maybe(0.7) else None
    cast, kind = d.of("fp32", "model"), d.of(torch.float32, dtype)
    gates = [d.noise(batch, 1, features, dtype=kind) for _ in residuals]
    what = named(x=x, weight=weight, residuals=residuals, cast=cast)
    outs = _twice(d, what, lambda: ops.project_skip_streams(
        x, weight, bias, residuals=residuals, c_out=gates, cast=cast))  # fmt: skip
    branch = oracle.linear(x, weight, bias).split(lengths, 1)
    size = oracle.linear(x.abs(), weight.abs(), _abs(bias)).split(lengths, 1)
    for out, r, b, s, gate in zip(outs, residuals, branch, size, gates, strict=True):
        steps = (4 if cast == "model" else 1.02) * EPS[r.dtype]
        close_to(what, out, oracle.close(r, b, 1.0, gate), _absolute(s, r, 1.0, gate),
                 budget=steps + 2 * EPS[dtype] + 2e-6)  # fmt: skip
    return what


def int8_linear(d: Draw) -> str:
    batch, n, channels, features, dtype = _linear_shape(d)
    x = d.laid_out(batch, n, channels, dtype=dtype)
    weight = d.noise(features, channels, dtype=dtype)
    kind = d.of("row", "group", "block")
    integers, scale = ops.quantize_weight(weight)
    wide, of_rows = oracle.quantised_rows(weight)
    if (
        not torch.equal(integers.double(), wide)
        and float((integers.double() - wide).abs().max()) > 1
    ):
        raise Mismatch(f"{named(weight=weight)}: quantised weight")
    groups = -(-channels // 128)
    if kind != "row":
        rows = features if kind == "group" else -(-features // 128)
        scale = d.positive(rows, groups, dtype=torch.float32) / 100
        of_rows = scale.double().repeat_interleave(128, 1)[:, :channels]
        if kind == "block":
            of_rows = of_rows.repeat_interleave(128, 0)[:features]
    real = integers.double() * of_rows
    bias = d.noise(features, dtype=d.of(dtype, torch.float32)) if d.maybe(0.7) else None
    shape = (batch, n, features)
    residual = d.laid_out(*shape, dtype=d.dtype()) if d.maybe(0.6) else None
    c_skip = d.coefficient(*shape) if residual is not None else 1.0
    c_out, cast = d.coefficient(*shape), d.of("fp32", "fp32", "model")
    activation, out_dtype = d.of(None, "gelu-tanh"), d.of(dtype, torch.float32)
    x_int, x_scale = oracle.quantised_rows(x)
    given: dict[str, Any] = {
        "activation": activation, "residual": residual, "c_skip": c_skip, "c_out": c_out,
        "cast": cast, "out_dtype": out_dtype,
    }  # fmt: skip
    what = named(x=x, weight=weight, kind=kind, bias=bias, **given)
    out = _twice(d, what, lambda: ops.int8_linear(x, integers, scale, bias, **given))
    branch = oracle.linear(x_int * x_scale, real, bias)
    size = oracle.linear((x_int * x_scale).abs(), real.abs(), _abs(bias))
    if activation:
        branch = 0.5 * branch * (
            1 + torch.tanh((2 / math.pi) ** 0.5 * (branch + 0.044715 * branch**3))
        )  # fmt: skip
    expected = oracle.close(residual, branch, c_skip, c_out)
    wide = _absolute(size, residual, c_skip, c_out)
    step = max(EPS[residual.dtype if residual is not None else out.dtype], EPS[out.dtype])
    # One value of x on the other side of a rounding boundary.
    flip = 1.0 / 127
    budget = (4 if cast == "model" else 1.02) * step + 2e-6
    try:
        close_to(what, out, expected, wide, budget=budget)
    except Mismatch:
        halves = (x.double() / x_scale - x_int).abs() > 0.4999
        if not bool(halves.any()):
            raise
        close_to(what, out, expected, wide, budget=budget + flip)
    return what


def denoise_step(d: Draw) -> str:
    shape = tuple(d.length(20) for _ in range(d.of(1, 3, 5)))
    kinds = (*EPS,)
    x, branch = (d.noise(*shape, dtype=d.of(*kinds)) for _ in range(2))
    noise = d.noise(*shape, dtype=d.of(*kinds)) if d.maybe(0.7) else None
    c = d.noise(3, dtype=torch.float64)
    what = named(x=x, branch=branch, noise=noise)
    out = _twice(d, what, lambda: ops.denoise_step(x, branch, noise, c))
    expected = c[0] * x.double() + c[1] * branch.double()
    expected = expected if noise is None else expected + c[2] * noise.double()
    close_to(what, out.flatten(), expected.flatten(), budget=1e-14)
    return what


def sparse_linear_attention(d: Draw) -> str:
    a = _Attention(d, most=260, aligned=True, causal=False,
                   attention=d.of("exact", "int8", "int8"))  # fmt: skip
    if a.spec.sm_scale is not None and a.spec.sm_scale <= 0:
        a.spec = _spec(d, a.heads, a.dim, causal=False, attention=a.spec.attention, sm_scale=None)
    a.norm(layer=False)
    weight = d.noise(a.dim, a.dim, dtype=d.of(a.dtype, torch.float32), size=a.dim**-0.5)
    bias = d.noise(a.dim, dtype=a.dtype) if d.maybe(0.8) else None
    share = d.value.choice([0.1, 0.3, 0.5, 1.0]) if a.dtype == torch.float32 else 1.0
    geometry = {"block_q": d.of(32, 64, 128), "block_k": d.of(32, 64, 128)}
    sparsity = ops.Sparsity(topk=share, **geometry)
    what = f"{a} {sparsity}"
    out = _twice(d, what, lambda: ops.sparse_linear_attention(
        a.q, a.k, a.v, weight, bias, a.spec, sparsity, rotary=a.rotary, **a.norms))  # fmt: skip
    q, k, v, _, scale = a.parts()
    q, k = (x.to(a.dtype).double() for x in (q, k))
    expected, gap = oracle.sparse_linear(q, k, v, weight, bias, scale, topk=share, **geometry)
    exact = a.spec.attention == "exact"
    size = v.abs().mean(2, keepdim=True) + expected.abs()
    clear = gap > 1e-3
    budget = {"exact": 24 * EPS[a.dtype] + 1e-5}.get(a.spec.attention, 2 * LOOSE[a.pv])
    # Its matrices are in 16 bits.
    budget += 8 * EPS[a.dtype] + (0.0 if exact else 2.0**-7)
    ours = oracle.heads_of(out, a.heads)
    close_to(what, ours[clear], expected[clear], size.expand_as(expected)[clear], budget=budget)
    if not bool(out.isfinite().all()):
        raise Mismatch(f"{what}: not finite")
    return what


def sage_interface(d: Draw) -> str:
    heads, groups, dim = d.of(1, 2, 3), d.of(1, 2), d.of(8, 16, 40, 64)
    batch, dtype, layout = d.value.randint(1, 2), d.dtype(), d.of("HND", "NHD")
    causal = d.maybe(0.3)
    long = d.value.random() < 0.06
    n_kv = d.value.randint(1024, 1100) if long else d.length(200)
    n_q = n_kv if causal else d.length(60)

    def made(n: int, h: int) -> Tensor:
        if layout == "NHD":
            return d.noise(batch, n, h, dim, dtype=dtype)
        if d.maybe():
            return d.noise(batch, n, h, dim, dtype=dtype).transpose(1, 2)
        return d.noise(batch, h, n, dim, dtype=dtype)

    q, k, v = made(n_q, heads * groups), made(n_kv, heads), made(n_kv, heads)
    what = named(q=q, k=k, layout=layout, causal=causal, strides=q.stride())
    out = _twice(d, what, lambda: sageattn(q, k, v, layout, causal))
    if layout == "NHD":
        q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    q, k, v = (x.double() for x in (q, k, v))
    seen = oracle.seen_keys(q, k, None, causal)
    expected, _ = oracle.attention(q, k, v, dim**-0.5, seen)
    size, _ = oracle.attention(q, k, v.abs(), dim**-0.5, seen)
    budget = 2 * LOOSE["bf16"] if n_kv >= 1024 else 16 * EPS[dtype] + 4e-6
    close_to(what, out, expected, size, budget=budget)
    return what


def fingerprints(d: Draw) -> str:
    """Equal bits, equal sums; one changed word is seen."""
    tensors = [
        d.noise(d.length(130), d.value.choice([1, 7, 64, 129]), dtype=d.dtype())
        for _ in range(d.value.randint(1, 4))
    ]
    prints = ops.Fingerprints(tensors)
    before = prints.take()
    what = named(tensors=tensors)
    if not torch.equal(before, prints.take()):
        raise Mismatch(f"{what}: other sums of the same bits")
    chosen = d.value.choice(tensors)
    place = d.value.randrange(chosen.numel())
    flat = chosen.view(-1).view(torch.int16)
    flat[place * (chosen.element_size() // 2)] ^= 1 << d.value.randrange(15)
    if torch.equal(before, prints.take()):
        raise Mismatch(f"{what}: element {place} changed and was not seen")
    d.inputs.clear()
    return what


OPERATIONS: dict[str, Callable[[Draw], str]] = {
    run.__name__: run
    for run in (
        attention_skip, attention_lse, masked_attention, attention_project_skip,
        project_skip, skip, norm_modulate, norm_modulate_rows, linear_gelu, norm_modulate_streams,
        project_skip_streams, int8_linear, denoise_step, sparse_linear_attention, sage_interface,
        fingerprints,
    )
}  # fmt: skip


def run_operation(d: Draw) -> str:
    """One random call; returns what it was.

    Raises:
        Mismatch: The result, a gradient or an input is not what it should be.
    """
    name = d.of(*OPERATIONS)
    try:
        what = OPERATIONS[name](d)
        d.check_inputs()
    except Mismatch as error:
        raise Mismatch(f"{name}: {error}") from None
    return f"{name}: {what}"
