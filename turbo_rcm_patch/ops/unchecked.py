"""The residual operations without checks, for patched blocks, which have checked their inputs.

Each takes plain tensors, numbers and strings by position, in the order of its body.
"""

from turbo_rcm_patch.ops.residual.norm import norm_operation as _norm
from turbo_rcm_patch.ops.residual.norm import rows_operation as _norm_rows
from turbo_rcm_patch.ops.residual.norm import skip_norm as _skip_norm
from turbo_rcm_patch.ops.residual.norm import skip_norm_rows as _skip_norm_rows
from turbo_rcm_patch.ops.residual.skip import skip_operation as _skip
from turbo_rcm_patch.ops.residual.streams import norm_modulate_streams as _norm_streams
from turbo_rcm_patch.ops.residual.streams import skip_norm_streams as _skip_norm_streams
from turbo_rcm_patch.ops.residual.streams import skip_streams as _skip_streams

__all__ = [
    "norm_modulate",
    "norm_modulate_rows",
    "norm_modulate_streams",
    "skip",
    "skip_norm",
    "skip_norm_rows",
    "skip_norm_streams",
    "skip_streams",
]

norm_modulate = _norm.unchecked
norm_modulate_rows = _norm_rows.unchecked
norm_modulate_streams = _norm_streams.unchecked
skip = _skip.unchecked
skip_norm = _skip_norm.unchecked
skip_norm_rows = _skip_norm_rows.unchecked
skip_norm_streams = _skip_norm_streams.unchecked
skip_streams = _skip_streams.unchecked
