"""Which kernels the launchers would start on a target, written as JSON: no GPU, no compilation.

Reads lists of cases, one a line, from its input, and answers each with a line: the launches. A
case names a target and an operation. The launchers run on meta tensors with their `launch` and
`target_of` replaced, so what is recorded is what a GPU gets: the same tiles, argument types and
constants.
"""

from __future__ import annotations

import importlib
import json
import sys
import types

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from turbo_rcm_patch.kernels.gluon import ran_on_hopper
from turbo_rcm_patch.kernels.launch import Target, Tile
from turbo_rcm_patch.kernels.operands import AttentionInputs
from turbo_rcm_patch.ops.shards import Tokens

PORTABLE = (
    "attention", "denoise", "fingerprint", "int8_linear", "norm", "one_launch", "project",
    "prologue", "rows", "shards", "skip", "skip_norm", "sparse_attention", "streams",
)  # fmt: skip
HOPPER = ("attention", "int8_linear", "linear_branch", "prologue", "shards")
#: The portable modules by their names, Hopper's as "hopper.attention" and so on.
MODULES = {name: f"portable.{name}" for name in PORTABLE} | {
    f"hopper.{name}": f"hopper.{name}" for name in HOPPER
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


def never(*_: object) -> bool:
    """In the place of `ran_on_hopper`: portable kernels everywhere."""
    return False


def describe(value: object, *, length: bool) -> dict[str, object]:
    """Type, constant and divisibility of one argument, as Triton specialises it at a launch; a
    length is not specialised."""
    if isinstance(value, tuple):
        return {"parts": [describe(part, length=length) for part in value]}
    if isinstance(value, torch.Tensor):
        return {"type": f"*{TYPES[value.dtype]}", "divisible": True}
    if isinstance(value, TensorDescriptor):
        block = ",".join(map(str, value.block_shape))
        return {"type": f"tensordesc<{TYPES[value.base.dtype]}[{block}]>"}
    if isinstance(value, GluonDescriptor):
        block = str(list(value.block_shape))
        return {"type": f"tensordesc<{TYPES[value.base.dtype]}{block},{value.layout!r}>"}
    if isinstance(value, bool) or value is None:
        return {"constant": value}
    if isinstance(value, int):
        if length:
            return {"type": "i32" if value < 2**31 else "i64"}
        if value == 1:
            return {"constant": 1}
        return {"type": "i32" if value < 2**31 else "i64", "divisible": value % 16 == 0}
    if isinstance(value, float):
        return {"type": "fp32"}
    raise TypeError(f"cannot describe {value!r}")


def record(case: dict[str, object]) -> list[dict[str, object]]:
    """The launches of one case."""
    target = Target(case["backend"], case["arch"])
    launches: list[dict[str, object]] = []
    modules: dict[str, types.ModuleType] = {
        name: importlib.import_module(f"turbo_rcm_patch.kernels.{path}")
        for name, path in MODULES.items()
    }

    def recording(kernel, grid, device, **arguments):
        options = {k: arguments.pop(k) for k in OPTIONS if k in arguments}
        constants = {p.name for p in kernel.params if p.is_constexpr}
        described = {}
        for name in kernel.arg_names:
            value = arguments.pop(name)
            if name in constants:
                value = str(value) if type(value).__name__ == "dtype" else value
                described[name] = {"constant": value}
            else:
                described[name] = describe(value, length=name in kernel.do_not_specialize)
        assert not arguments, f"{kernel.__name__} got unknown arguments {sorted(arguments)}"
        launches.append(
            {
                "module": kernel.__module__.removeprefix("turbo_rcm_patch.kernels."),
                "kernel": kernel.__name__,
                "gluon": kernel.is_gluon(),
                "arguments": described,
                "options": options,
                "backend": target.backend,
                "arch": target.arch,
                "case": case["name"],
            }
        )

    for module in modules.values():
        module.launch = recording
        if hasattr(module, "target_of"):
            module.target_of = lambda device: target
        if hasattr(module, "ran_on_hopper"):
            module.ran_on_hopper = never if case.get("portable") else ran_on_hopper
    run(case, modules)
    return launches


def run(case: dict[str, object], modules: dict[str, types.ModuleType]) -> None:
    heads, dim, tokens = case["heads"], case["head_dim"], case["tokens"]
    dtype = getattr(torch, case["dtype"])
    channels = heads * dim

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k, v = empty(1, tokens, 3 * channels).chunk(3, -1)
    residual, gate = empty(1, tokens, channels), empty(1, 1, channels, dtype=torch.float32)
    table = empty(tokens, dim, dtype=torch.float32)
    lengths = empty(1, dtype=torch.int32) if case.get("lengths") else None
    norm = case.get("norm", "across")
    table = table if case.get("rope", True) else None
    common = {
        "heads": heads,
        "attention": "int8",
        "impl": "triton",
        "norm_q": {"across": empty(channels), "head": empty(dim), "layer": empty(dim)}.get(norm),
        "norm_k": {"across": empty(channels), "head": empty(dim), "layer": empty(dim)}.get(norm),
        "norm_q_bias": empty(dim) if norm == "layer" else None,
        "norm_k_bias": empty(dim) if norm == "layer" else None,
        "cos": table,
        "sin": table,
        "kv_lengths": lengths,
        "pv": case["pv"],
        "smooth_k": True,
        "causal": case.get("causal", False),
        "sm_scale": dim**-0.5,
        "eps": 1e-6,
        "out_dtype": dtype,
        "residual": residual,
        "c_skip": None,
        "c_skip_value": 1.0,
        "c_out": gate,
        "c_out_value": 1.0,
        "want_lse": bool(case.get("lse")),
    }
    inputs = AttentionInputs(q=q, k=k, v=v, **common)
    weight, bias = empty(channels, channels), empty(channels)
    operation = case["operation"]
    if operation == "attention":
        modules["attention"].attention(inputs)
    elif operation == "plain-attention":
        tile = Tile(*case["tile"]) if "tile" in case else None
        modules["attention"].attention(inputs._replace(residual=None, c_out=None), tile=tile)
    elif operation == "denoise":
        x, c = residual.double(), empty(3, dtype=torch.float64)
        for noise in (None, residual.float()):
            modules["denoise"].denoise_step(x, residual, noise, c)
    elif operation == "one-launch":
        modules["one_launch"].attention_project_skip(inputs, weight, bias, cast="fp32")
    elif operation == "project":
        residual = residual[:, :8192]  # more is cuBLAS's
        for cast in ("fp32", "model"):
            modules["project"].project_skip(
                residual, weight, bias, residual, 1.0, gate, cast=cast, out_dtype=dtype
            )
            modules["skip"].skip(residual, residual, 1.0, gate, cast=cast, out_dtype=dtype)
    elif operation == "sparse":
        block_q, block_k = case["blocks"]
        modules["sparse_attention"].sparse_linear_attention(
            inputs.alone(), empty(dim, dim, dtype=torch.float32), empty(dim),
            count=max(1, tokens // block_k // 10), block_q=block_q, block_k=block_k,
        )  # fmt: skip
    elif operation == "shards":
        shards(modules["shards"], q, k, v, common)
    elif operation == "int8-linear":
        int8_linears(case, modules, residual, gate)
    elif operation == "norm":
        modules["norm"].norm_modulate(residual, gate, gate, one=1.0, eps=1e-6, out_dtype=dtype)
        for weight in (empty(channels), empty(dim)):
            modules["norm"].norm_rotate(
                q, heads, weight=weight, bias=None, cos=table, sin=table, eps=1e-6
            )
    elif operation == "residual":
        wide_residual(case, modules, residual, gate, weight, bias)
    elif operation == "skip-norm":
        skip_norm(case, modules, residual, gate)
    elif operation == "streams":
        streams(case, modules, residual)
    elif operation == "fingerprint":
        modules["fingerprint"].fingerprint(modules["fingerprint"].Table([weight, bias]))
    elif operation == "norm-rows":
        norm_rows(modules, residual, gate)
    elif operation in ("hopper-linear", "hopper-linear-blocks"):
        hopper_linears(case, modules, residual, gate)


def shards(own, q, k, v, common) -> None:
    """What context-parallel attention launches around its exchanges."""
    heads, fp8 = common["heads"], common["pv"] == "fp8"
    q, k = (
        Tokens(
            x, heads, common[f"norm_{name}"], common[f"norm_{name}_bias"], common["cos"],
            common["sin"], 1e-6,
        )
        for name, x in (("q", q), ("k", k))
    )  # fmt: skip
    mean, of_v, amax = own.statistics(k, v, first=1, step=8, smooth_k=True, fp8=fp8)
    queries = own.queries(q, sm_scale=common["sm_scale"], qmax=127)
    keys = own.keys(k, mean, qmax=127)
    levels, values = None, v
    if fp8:
        values, errors = own.values(v, of_v, amax)
        levels = own.value_levels(of_v, amax)
        levels = torch.cat([levels, errors.view(torch.float32).unsqueeze(2)], 2)
    own.attend(
        queries, keys, values, levels,
        n_q=v.shape[1], n_kv=v.shape[1], head_dim=v.shape[2] // heads, pv=common["pv"],
        out_dtype=torch.float32, want_lse=True,
    )  # fmt: skip


def norm_rows(modules, residual, gate) -> None:
    """The norms before a block's products, with a modulation of the batch and of every token."""
    for factor in (gate, gate.expand(residual.shape).contiguous(), None):
        modules["norm"].norm_modulate_rows(residual, factor, factor, one=1.0, eps=1e-6)


def wide_residual(case, modules, narrow, gate, weight, bias) -> None:
    """What reads or writes a residual stream that is in fp32 between the branches of a block: the
    norm in front of a branch, and the skip behind the first, a middle and the last one."""
    wide, dtype, channels = narrow.float(), narrow.dtype, narrow.shape[2]
    modules["norm"].norm_modulate(wide, gate, gate, one=1.0, eps=1e-6, out_dtype=dtype)
    modules["norm"].norm_modulate_rows(wide, gate, gate, one=1.0, eps=1e-6)
    rows = modules["rows"].quantize_rows(narrow)
    int8, scale = weight.new_empty(channels, channels, dtype=torch.int8), gate.new_empty(channels)
    few = narrow[:, :8192]  # more is cuBLAS's
    for stream, out in ((narrow, torch.float32), (wide, torch.float32), (wide, dtype)):
        how = {"cast": "fp32", "out_dtype": out}
        modules["skip"].skip(stream, narrow, 1.0, gate, **how)
        modules["project"].project_skip(few, weight, bias, stream[:, :8192], 1.0, gate, **how)
        modules["int8_linear"].int8_linear(
            rows, int8, scale, bias, stream, 1.0, gate, gelu=False, **how
        )


def skip_norm(case, modules, narrow, gate) -> None:
    """A skip with the norm behind it, and that norm alone: with a gate and a modulation, and with
    neither, before a norm with weights."""
    stream, dtype = getattr(torch, case["stream"]), narrow.dtype
    gated = (gate, gate, 1.0) if case["modulated"] else (1.0, narrow[:, :1], 0.0)
    c_out, factor, one = gated
    how = {"one": one, "eps": 1e-6}
    own, norm, given = modules["skip_norm"], modules["norm"], (narrow.to(stream), narrow, c_out)
    cast = {"cast": "model" if stream == dtype else "fp32", "out_dtype": stream}
    y, _ = own.skip_norm(*given, factor, factor, normed_dtype=dtype, **cast, **how)
    norm.norm_modulate(y, factor, factor, out_dtype=dtype, **how)
    own.skip_norm(*given, factor, factor, normed_dtype=torch.int8, **cast, **how)
    norm.norm_modulate_rows(y, factor, factor, **how)


def streams(case, modules, narrow) -> None:
    """The norm of two streams, a skip with that norm, and the skip alone: with rows of a Linear
    and weights of the layer norm, and with factors in fp32."""
    stream, channels = getattr(torch, case["stream"]), narrow.shape[2]
    x = narrow[:, :64].to(stream), narrow[:, 64:].to(stream)
    rows = narrow.new_empty(narrow.shape[0], 6, 1, channels)
    weight, bias, one = narrow.new_empty(channels), narrow.new_empty(channels), 1.0
    modulation = rows[:, :2].unbind(1), rows[:, 2:4].unbind(1), weight, bias
    if case["folded"]:
        wide, one = rows.float(), 0.0
        modulation = wide[:, :2].unbind(1), wide[:, 2:4].unbind(1), None, None
    how = {"cast": "model" if stream == narrow.dtype else "fp32", "one": one, "eps": 1e-6}
    how |= {"out_dtype": stream, "normed_dtype": narrow.dtype}
    gates, own = rows[:, 4:].unbind(1), modules["streams"]
    own.streams(x, None, None, *modulation, **how)
    own.streams(x, narrow, gates, *modulation, **how)
    own.streams(x, narrow, gates, None, None, None, None, **how)


def int8_linears(case, modules, residual, gate) -> None:
    """Linears as a block runs them: with GELU, with the skip, plain, and with a rounded skip."""
    channels, dtype = residual.shape[2], residual.dtype
    rows = modules["rows"].quantize_rows(residual)
    weight, scale = modules["rows"].quantize_rows(residual.new_empty(1, channels, channels))
    scale, bias, more = scale[0], residual[0, 0], case.get("tuning", {})
    if case.get("grouped"):
        scale = scale.new_empty(channels, -(-channels // 128))
    if case.get("blocks"):
        scale = scale.new_empty(-(-channels // 128), -(-channels // 128))
    if "tile" in more:
        more = more | {"tile": Tile(*more["tile"])}
    variants = [(False, residual, gate, "fp32")]
    if case.get("rest"):
        variants = [
            (True, None, 1.0, "fp32"),
            (False, None, 1.0, "fp32"),
            (False, residual, 1.0, "model"),
        ]
    for gelu, skip, c_out, cast in variants:
        modules["int8_linear"].int8_linear(
            rows, weight[0], scale, bias, skip, 1.0, c_out,
            gelu=gelu, cast=cast, out_dtype=dtype, **more,
        )  # fmt: skip


def hopper_linears(case, modules, residual, gate) -> None:
    """With GELU, plain, and with the skip, or those that the case names; a scale per row in the
    schedule of the case."""
    channels, blocks = residual.shape[2], case["operation"] == "hopper-linear-blocks"
    own = modules["hopper.int8_linear"]
    schedule = None if blocks else own.SCHEDULES[case["schedule"]]
    rows = modules["rows"].quantize_rows(residual)
    groups = -(-channels // 128)
    scale = residual.new_empty((groups, groups) if blocks else channels, dtype=torch.float32)
    weight, y = residual.new_empty(channels, channels, dtype=torch.int8), residual.clone()
    forms = {
        "gelu": (True, None, 1.0),
        "plain": (False, None, 1.0),
        "skip": (False, residual, gate),
    }
    for gelu, skip, c_out in map(forms.get, case.get("forms", forms)):
        own.hopper_linear(
            y, rows, weight, scale, residual[0, 0], skip, 1.0, c_out,
            gelu=gelu, cast="fp32", permuted=case.get("permuted"), schedule=schedule,
        )  # fmt: skip


def main() -> None:
    for asked in sys.stdin:
        unique: dict[str, dict[str, object]] = {}
        for case in json.loads(asked):
            only = case.pop("only", None)
            for launch in record(case):
                if only is not None and launch["kernel"] not in only:
                    continue
                key = json.dumps({k: v for k, v in launch.items() if k != "case"}, sort_keys=True)
                unique.setdefault(key, launch)
        print(json.dumps(list(unique.values())), flush=True)


if __name__ == "__main__":
    main()
