"""The operations without checks, for patched blocks, which have checked their inputs.

Each takes plain tensors, numbers and strings by position, in the order of its body.
"""

from turbo_rcm_patch.ops.attention.api import attention as _attention
from turbo_rcm_patch.ops.attention.api import norm_rotate as _norm_rotate
from turbo_rcm_patch.ops.attention.one_launch import attention_project_operation as _project
from turbo_rcm_patch.ops.int8_linear.api import int8_linear_operation as _int8_linear
from turbo_rcm_patch.ops.int8_linear.api import int8_linear_rows as _int8_linear_rows
from turbo_rcm_patch.ops.int8_linear.api import linear_gelu_operation as _linear_gelu
from turbo_rcm_patch.ops.int8_linear.api import quantize_rows as _quantize_rows
from turbo_rcm_patch.ops.residual.norm import norm_operation as _norm
from turbo_rcm_patch.ops.residual.norm import rows_operation as _norm_rows
from turbo_rcm_patch.ops.residual.norm import skip_norm as _skip_norm
from turbo_rcm_patch.ops.residual.norm import skip_norm_rows as _skip_norm_rows
from turbo_rcm_patch.ops.residual.skip import skip_operation as _skip
from turbo_rcm_patch.ops.residual.streams import norm_modulate_streams as _norm_streams
from turbo_rcm_patch.ops.residual.streams import skip_norm_streams as _skip_norm_streams
from turbo_rcm_patch.ops.residual.streams import skip_streams as _skip_streams
from turbo_rcm_patch.ops.sparse_linear.api import sparse_linear_operation as _sparse

__all__ = [
    "attention",
    "attention_project_skip",
    "int8_linear",
    "int8_linear_rows",
    "linear_gelu",
    "norm_modulate",
    "norm_modulate_rows",
    "norm_modulate_streams",
    "norm_rotate",
    "quantize_rows",
    "skip",
    "skip_norm",
    "skip_norm_rows",
    "skip_norm_streams",
    "skip_streams",
    "sparse_linear_attention",
]

attention = _attention.unchecked
attention_project_skip = _project.unchecked
int8_linear = _int8_linear.unchecked
int8_linear_rows = _int8_linear_rows.unchecked
linear_gelu = _linear_gelu.unchecked
norm_modulate = _norm.unchecked
norm_modulate_rows = _norm_rows.unchecked
norm_modulate_streams = _norm_streams.unchecked
norm_rotate = _norm_rotate.unchecked
quantize_rows = _quantize_rows.unchecked
skip = _skip.unchecked
skip_norm = _skip_norm.unchecked
skip_norm_rows = _skip_norm_rows.unchecked
skip_norm_streams = _skip_norm_streams.unchecked
skip_streams = _skip_streams.unchecked
sparse_linear_attention = _sparse.unchecked
