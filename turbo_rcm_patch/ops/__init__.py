"""Public tensor operations. They check their arguments, are registered with torch, and choose an
implementation.

Importing this package loads neither triton nor diffusers; a Triton kernel is imported when it is
first launched.
"""

from turbo_rcm_patch.ops.attention.api import attention_skip
from turbo_rcm_patch.ops.attention.spec import AttentionSpec
from turbo_rcm_patch.ops.dispatch import (
    FP8_MIN_KEYS,
    INT8_MIN_KEYS,
    describe_pv,
    quantises,
    resolve_impl,
    resolve_pv,
    resolved,
)
from turbo_rcm_patch.ops.formats import Int8Tensor, Norms
from turbo_rcm_patch.ops.int8_linear.api import (
    MAX_CHANNELS,
    int8_linear,
    linear_gelu,
    quantize_weight,
)
from turbo_rcm_patch.ops.residual.api import norm_modulate, norm_modulate_rows, skip
from turbo_rcm_patch.ops.sparse_linear.api import (
    MAX_SPARSE_HEAD_DIM,
    SPARSE_BLOCKS,
    Sparsity,
    sparse_linear_attention,
)

__all__ = [
    "FP8_MIN_KEYS",
    "INT8_MIN_KEYS",
    "MAX_CHANNELS",
    "MAX_SPARSE_HEAD_DIM",
    "SPARSE_BLOCKS",
    "AttentionSpec",
    "Int8Tensor",
    "Norms",
    "Sparsity",
    "attention_skip",
    "describe_pv",
    "int8_linear",
    "linear_gelu",
    "norm_modulate",
    "norm_modulate_rows",
    "quantises",
    "quantize_weight",
    "resolve_impl",
    "resolve_pv",
    "resolved",
    "skip",
    "sparse_linear_attention",
]
