"""Choose the attention and the kernels that run.

Device and lengths decide three things: the attention of "auto" (exact or int8), the type of
probabilities and values of "auto" (e4m3 or bf16), and the kernels (Triton or plain torch). The
functions read numbers, never tensors. They run inside the registered operations, where shapes are
numbers, so that a compiled graph does not depend on the choice.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

import torch

from turbo_rcm_patch.config import CHOICES, PVDType, check_choice
from turbo_rcm_patch.errors import Fp8UnsupportedError
from turbo_rcm_patch.ops.formats import QMAX

if TYPE_CHECKING:
    from turbo_rcm_patch.ops.attention.spec import AttentionSpec
    from turbo_rcm_patch.ops.launch import Target

_F = TypeVar("_F", bound=Callable[..., Any])

#: The GPU for which tensors on the meta device stand, as (backend, architecture), or None.
_stand_in: Target | None = None

#: Least number of queries and of keys for which attention="auto" is int8 on a GPU. On an H200,
#: with values in bf16 and norms counted, int8 has four times the error of exact attention. It is
#: 1.02 to 1.08 times as fast over 4,096 tokens; over 6,144 it is 1.17 to 1.30 times as fast with
#: heads of 128 channels, and 1.03 to 1.09 with 64 (results/2026-11-28/int8_threshold.txt). Other
#: cards have not been measured.
INT8_AUTO_TOKENS: Final = 6144
#: Least number of keys for which pv="auto" takes fp8 where the device has it, and that of Hopper.
#: fp8 has three times the error of bf16. In return it makes the second product faster. Hopper has
#: a kernel of its own for bf16 as well (`gluon.py`): with 12 heads of 128 on an H200, fp8 saves
#: nothing of the attention's time over 4,096 tokens, 5 % over 8,192 and 15 % over 16,384
#: (results/2026-11-28/attention_pv.json); 12,288 lies between. Other cards have not been measured.
FP8_MIN_KEYS: Final = 4096
FP8_MIN_KEYS_HOPPER: Final = 12288
#: Keys below which a patched cross-attention is exact where int8 was asked for: over the 512
#: tokens of a prompt torch's own attention takes 182 us on an H200 (32,760 queries, 12 heads of
#: 128) and int8 takes 980, so exact attention is faster and more exact.
INT8_MIN_KEYS: Final = 1024


class Implementation(NamedTuple, Generic[_F]):
    """One row of an operator's table. The first whose condition holds for a call runs.

    Attributes:
        name: The name of its file.
        serves: The condition, of the target and the operator's own record of the call.
        reason: The condition in words, for the report.
        load: Imports and returns the function that launches it, the same type in all rows.
        what: The result that it computes, for the report and a warning.
    """

    name: str
    serves: Callable[[Target, Any], bool]
    reason: str
    load: Callable[[], _F]
    what: str


def always(target: Target, call: Any) -> bool:
    """Serve every call, as the last row of a table does."""
    return True


def choose(
    table: Sequence[Implementation[_F]],
    device: torch.device,
    call: Any,
    counts: Counter[str] | None = None,
) -> _F:
    """Return the function of the first implementation that serves a call.

    An implementation that this release of Triton cannot import is passed over, and one that it
    cannot compile runs the last row instead.

    Args:
        table: The implementations.
        device: The device of the call.
        call: The record that the conditions read.
        counts: Counts the implementation that runs, by its name.
    """
    from turbo_rcm_patch.ops.gluon import hopper_function
    from turbo_rcm_patch.ops.launch import target_of

    target = target_of(device)
    *special, portable = table
    for row in special:
        if row.serves(target, call):
            function = hopper_function(row.load, row.what)
            if function is not None:
                return _or_portable(function, row, portable, counts)
    _note(portable, counts)
    return portable.load()


def _or_portable(
    function: _F,
    row: Implementation[_F],
    portable: Implementation[_F],
    counts: Counter[str] | None,
) -> _F:
    """Return the function of a row, which runs that of the last if Triton cannot compile it."""
    from turbo_rcm_patch.ops.gluon import give_up, is_compiler_error

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if not is_compiler_error(error):
                raise
            give_up(row.what, error)
        else:
            _note(row, counts)
            return result
        _note(portable, counts)
        return portable.load()(*args, **kwargs)

    return cast("_F", run)


def _note(row: Implementation[Any], counts: Counter[str] | None) -> None:
    """Note that an implementation runs."""
    _chosen[row] = None
    if counts is not None:
        counts[row.name] += 1


#: The implementations that ran in this process, in the order of first use. A recorded launch is
#: repeated without a choice, so it is here once.
_chosen: dict[Implementation[Any], None] = {}


def chosen() -> list[str]:
    """Return what ran in this process and why, a line per kind of operation."""
    lines: dict[str, list[str]] = {}
    for row in _chosen:
        lines.setdefault(row.what, []).append(f"{row.name} ({row.reason})")
    return [f"{what}: {', '.join(names)}" for what, names in lines.items()]


@contextmanager
def meta_stands_for(target: Target) -> Iterator[None]:
    """Let tensors on the meta device stand for those of a GPU, so that what would run there can be
    compiled where it is not. For a process that does nothing else."""
    global _stand_in
    _stand_in = target
    _forget_choices()
    try:
        yield
    finally:
        _stand_in = None
        _forget_choices()


def _forget_choices() -> None:
    for choice in (resolve_impl, resolved):
        choice.cache_clear()


def stand_in(device: torch.device) -> Target | None:
    """Return the GPU for which tensors on a device stand, or None where they are what they say."""
    return _stand_in if device.type == "meta" else None


def on_gpu(device: torch.device) -> bool:
    """Return True if a device is a GPU (CUDA or HIP), or stands for one."""
    return device.type == "cuda" or stand_in(device) is not None


def without_data(x: torch.Tensor) -> bool:
    """Return True if a tensor lies on the meta device and stands for nothing."""
    return x.is_meta and _stand_in is None


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, or None of any other device."""
    if target := stand_in(device):
        return divmod(int(target.arch), 10)
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


@cache
def resolve_impl(impl: str, device: torch.device) -> Literal["triton", "reference"]:
    """Return the implementation that runs on a device.

    "auto" is "triton" on a GPU (CUDA or HIP) and "reference" elsewhere. On a GPU without the
    package triton it is "reference" too, with one warning. The launchers refuse "triton" on other
    devices unless Triton's interpreter is on.

    Raises:
        ConfigError: `impl` is none of these words.
    """
    if impl == "auto":
        if not on_gpu(device):
            return "reference"
        if find_spec("triton") is not None:
            return "triton"
        warnings.warn(
            "triton is not installed, so fused operations run in plain torch, which is slower: "
            "pip install triton (on Windows: triton-windows)",
            RuntimeWarning,
            stacklevel=2,
        )
        return "reference"
    check_choice("impl", impl, CHOICES["impl"])
    return "triton" if impl == "triton" else "reference"


def compile_ahead(impl: str, device: torch.device, call: Callable[[], object]) -> None:
    """Compile what a call launches on a GPU, several kernels at a time: `launch.compile_ahead`."""
    if device.type == "cuda" and resolve_impl(impl, device) == "triton":
        from turbo_rcm_patch.ops import launch

        launch.compile_ahead(call, device)


def resolve_pv(
    pv: PVDType, device: torch.device, n_kv: int | None = None
) -> Literal["fp8", "bf16", "fp16"]:
    """Return the element type of probabilities and values on a device.

    "auto" is fp8 on an NVIDIA GPU of compute capability 8.9 or newer from `fp8_min_keys` keys on,
    and bf16 elsewhere. A type that is asked for by name is taken at any length.

    Args:
        pv: The type that was asked for, or "auto".
        device: The device of the attention.
        n_kv: Number of keys; None for as many as fp8 needs.

    Raises:
        Fp8UnsupportedError: fp8 was asked for by name on a GPU without e4m3 matrix units.
    """
    if pv in ("bf16", "fp16"):
        return pv
    if not on_gpu(device):
        return "fp8" if pv == "fp8" else "bf16"
    if pv == "auto" and n_kv is not None and n_kv < fp8_min_keys(device):
        return "bf16"
    capability = capability_of(device)  # None on a HIP device, whose e4m3 is another format
    has_fp8 = capability is not None and capability >= (8, 9)
    if pv == "fp8" and not has_fp8:
        raise Fp8UnsupportedError(
            'pv="fp8"',
            expected="a GPU of compute capability 8.9 or newer",
            got=".".join(map(str, capability or ["HIP"])),
            remedy='Use pv="auto"',
        )
    return "fp8" if has_fp8 else "bf16"


def fp8_min_keys(device: torch.device) -> int:
    """Return the number of keys from which pv="auto" takes fp8 on a device that has it."""
    if capability_of(device) != (9, 0) or find_spec("triton") is None:
        return FP8_MIN_KEYS
    from turbo_rcm_patch.ops.gluon import has_hopper_kernels

    return FP8_MIN_KEYS_HOPPER if has_hopper_kernels() else FP8_MIN_KEYS


def describe_pv(pv: PVDType, device: torch.device) -> str:
    """Describe the result of `resolve_pv` on a device for all lengths."""
    resolved = resolve_pv(pv, device)
    if pv == "auto" and resolved == "fp8":
        return f"fp8 from {fp8_min_keys(device):,} keys, else {resolve_pv(pv, device, 0)}"
    return resolved


def quantises(attention: str) -> bool:
    """Return True for attentions that may run in int8 or int4: "int8", "int4" and "auto"."""
    return attention == "auto" or attention in QMAX


@lru_cache(maxsize=4096)
def resolved(
    spec: AttentionSpec, device: torch.device, n_q: int, n_kv: int, want_lse: bool = False
) -> AttentionSpec:
    """Return the spec with its attention, pv and impl decided for a device and these lengths."""
    attention, pv = spec.attention, spec.pv
    if attention == "auto":
        # The exact path computes the logsumexp slowly, in plain torch.
        short = min(n_q, n_kv) < INT8_AUTO_TOKENS and on_gpu(device) and not want_lse
        attention = "exact" if short else "int8"
    if attention in QMAX:
        pv = resolve_pv(pv, device, n_kv)
    return replace(spec, attention=attention, pv=pv, impl=resolve_impl(spec.impl, device))
