"""The operations without checks, for patched blocks, which have checked their inputs.

Each takes plain tensors, numbers and strings by position, in the order of its body.
"""

from turbo_rcm_patch.ops.attention import attention, norm_rotate
from turbo_rcm_patch.ops.int8_linear import (
    int8_linear_operation as int8_linear,
)
from turbo_rcm_patch.ops.int8_linear import (
    int8_linear_rows,
    quantize_rows,
)
from turbo_rcm_patch.ops.int8_linear import (
    linear_gelu_operation as linear_gelu,
)
from turbo_rcm_patch.ops.norm import norm_operation as norm_modulate
from turbo_rcm_patch.ops.norm import rows_operation as norm_modulate_rows
from turbo_rcm_patch.ops.norm import skip_norm, skip_norm_rows
from turbo_rcm_patch.ops.one_launch import attention_project_operation as attention_project_skip
from turbo_rcm_patch.ops.skip import skip_operation as skip
from turbo_rcm_patch.ops.sparse_linear import sparse_linear_operation as sparse_linear_attention
from turbo_rcm_patch.ops.streams import norm_modulate_streams, skip_norm_streams, skip_streams

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
