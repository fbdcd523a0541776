"""Public tensor operations: they validate, are registered with torch, and choose an
implementation.

Importing this package loads neither triton nor diffusers; a Triton kernel is imported when it is
first launched.
"""

from turbo_rcm_patch.kernels.operands import Rows
from turbo_rcm_patch.ops.attention import attention_lse, attention_skip, masked_attention
from turbo_rcm_patch.ops.denoise import denoise_step
from turbo_rcm_patch.ops.dispatch import (
    FP8_MIN_KEYS,
    INT8_MIN_KEYS,
    attention_name,
    choose_form,
    describe_pv,
    dispatch_path,
    dispatch_rows,
    exact_below,
    keep_dispatch,
    measure_dispatch,
    quantises,
    resolve_impl,
    resolve_pv,
    resolved,
)
from turbo_rcm_patch.ops.elementwise import linear_gelu, norm_modulate, norm_modulate_rows
from turbo_rcm_patch.ops.fingerprint import Fingerprints
from turbo_rcm_patch.ops.fused import attention_project_skip
from turbo_rcm_patch.ops.int8_linear import int8_linear
from turbo_rcm_patch.ops.projection import project_skip, skip
from turbo_rcm_patch.ops.quantize import MAX_CHANNELS, quantize_weight
from turbo_rcm_patch.ops.sparse_linear import (
    MAX_SPARSE_HEAD_DIM,
    SPARSE_BLOCKS,
    Sparsity,
    sparse_linear_attention,
)
from turbo_rcm_patch.ops.spec import AttentionSpec
from turbo_rcm_patch.ops.streams import norm_modulate_streams, project_skip_streams

__all__ = [
    "FP8_MIN_KEYS",
    "INT8_MIN_KEYS",
    "MAX_CHANNELS",
    "MAX_SPARSE_HEAD_DIM",
    "SPARSE_BLOCKS",
    "AttentionSpec",
    "Fingerprints",
    "Rows",
    "Sparsity",
    "attention_lse",
    "attention_name",
    "attention_project_skip",
    "attention_skip",
    "choose_form",
    "denoise_step",
    "describe_pv",
    "dispatch_path",
    "dispatch_rows",
    "exact_below",
    "int8_linear",
    "keep_dispatch",
    "linear_gelu",
    "masked_attention",
    "measure_dispatch",
    "norm_modulate",
    "norm_modulate_rows",
    "norm_modulate_streams",
    "project_skip",
    "project_skip_streams",
    "quantises",
    "quantize_weight",
    "resolve_impl",
    "resolve_pv",
    "resolved",
    "skip",
    "sparse_linear_attention",
]
