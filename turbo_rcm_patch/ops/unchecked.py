"""Temporary shim until the operations are rewritten."""

import importlib

import torch

_m = lambda n: importlib.import_module("turbo_rcm_patch.ops." + n)
elementwise, _il, projection, registry, sparse_linear, streams, fused = map(
    _m,
    ["elementwise", "int8_linear", "projection", "registry", "sparse_linear", "streams", "fused"],
)
linear_gelu = elementwise.gelu_forward
norm_modulate = elementwise.norm_forward
norm_modulate_rows = elementwise.rows_forward
skip_norm = elementwise.skip_norm


def skip_norm_rows(*a):
    y, rows = elementwise.skip_norm(*a, torch.int8)
    return y, rows[0], rows[1]


skip = projection.skip_forward
attention = registry.attention_forward
norm_modulate_streams = streams.norm_both
skip_norm_streams = streams.skip_norm_both
skip_streams = streams.skip_both
sparse_linear_attention = sparse_linear.sparse_linear_forward


def int8_linear(x, w, s, b, act, impl, dt):
    return _il.linear_forward(x, w, s, b, None, None, None, 1.0, 1.0, act, "fp32", impl, dt)


def int8_linear_rows(i, sc, w, s, b, act, impl, dt):
    return _il.rows_linear_forward(
        i, sc, w, s, b, None, None, None, 1.0, 1.0, act, "fp32", impl, dt
    )


def attention_project_skip(*a):
    return fused.one_launch(*a)


def norm_rotate(x, weight, bias, cos, sin, heads, eps, impl):
    from turbo_rcm_patch.ops.reference import norm_rope

    return (
        norm_rope(x, heads, weight=weight, bias=bias, cos=cos, sin=sin, eps=eps)
        .transpose(1, 2)
        .flatten(2)
        .to(x.dtype)
    )


def quantize_rows(x, impl):
    return _il._rows_of(x, impl)
