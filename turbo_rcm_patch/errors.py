"""The errors that this library raises on purpose.

Each class also inherits from a built-in error, so `except ValueError` keeps working. A message
says which argument is wrong, what was expected, what was given, and what to do about it.
"""

from __future__ import annotations

import textwrap

from turbo_rcm_patch.text import as_typed, printable


class TurboRCMError(Exception):
    """Base class of all errors of this library."""

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        # Names from files may hold what a terminal would obey.
        what, expected, got, remedy = map(printable, (what, expected, got, remedy))
        parts = [what.rstrip(".")]
        if expected:
            parts.append(f"expected {expected}")
        if got:
            parts.append(f"got {got}")
        text = "; ".join(parts) + "."
        if remedy:
            text += f" {remedy.rstrip('.')}."
        super().__init__(text)
        self.what, self.expected, self.got, self.remedy = what, expected, got, remedy

    def block(self) -> str:
        """Return the error on several lines, with the remedy as the command line takes it."""
        lines = [f"{type(self).__name__}: {self.what}"]
        wrap = textwrap.TextWrapper(
            96, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
        )
        texts = {"expected": self.expected, "got": self.got, "remedy": as_typed(self.remedy)}
        for name, text in texts.items():
            wrap.initial_indent = f"  {name + ':':<10}"
            lines += wrap.wrap(text)
        return "\n".join(lines)


class ConfigError(TurboRCMError, ValueError):
    """An option has an invalid value."""


# --- patching ------------------------------------------------------------------------------------


class PatchError(TurboRCMError):
    """Patching or unpatching was refused. The model is unchanged."""


class NotAModelError(PatchError, TypeError):
    """The argument is neither a torch module nor a pipeline that holds one."""


class UnknownArchitectureError(PatchError, ValueError):
    """No registered family knows this class."""


class NothingToPatchError(PatchError, ValueError):
    """The model is known, but no pair can run fused with this configuration."""


class AlreadyPatchedError(PatchError, RuntimeError):
    """The model is already patched."""


class NotPatchedError(PatchError, RuntimeError):
    """The model is not patched."""


class WrappedError(PatchError, RuntimeError):
    """Other code wrapped our function, so undoing would drop that change."""


class FamilyError(PatchError, RuntimeError):
    """The class is known, but this instance cannot be patched, for example because a forward has
    another signature than this release knows."""


class OffloadedError(PatchError, RuntimeError):
    """An offloading hook manages the weights that are to be replaced."""


class DroppedWeightError(PatchError, RuntimeError):
    """A write was attempted into a weight that exists only in int8."""


class PlanError(PatchError, ValueError):
    """A plan is damaged, or was made for another model or other options."""


class ContextParallelError(PatchError, RuntimeError):
    """The model is split over several ranks in a way that the fused path does not support, or the
    ranks were given different things."""


# --- operations ----------------------------------------------------------------------------------


class OpError(TurboRCMError):
    """An operation cannot compute what its arguments ask for."""


class ShapeError(OpError, ValueError):
    """Shapes or strides do not fit together, or head_dim is outside what the kernels take."""


class DTypeError(OpError, TypeError):
    """A tensor has a dtype that the operation does not take."""


class MaskError(OpError, ValueError):
    """This kind of mask cannot be applied exactly."""


class DeviceError(OpError, RuntimeError):
    """The requested implementation cannot run on this device."""


class Fp8UnsupportedError(DeviceError):
    """fp8 was requested on a device without fp8 matrix units (below sm_89)."""


class GradientError(OpError, RuntimeError):
    """A gradient was requested that the operation does not define."""


class NonFiniteInputError(OpError, ValueError):
    """The input of the first patched block has a NaN or an infinity."""


# --- sampling ------------------------------------------------------------------------------------


class SamplingError(TurboRCMError):
    """Generating or comparing videos failed."""


class ModelFolderError(SamplingError, OSError):
    """The folder or hub id has no pipeline that can be loaded."""


# --- checkpoints ---------------------------------------------------------------------------------


class CheckpointError(TurboRCMError, ValueError):
    """A checkpoint or a converted folder cannot be read or has the wrong contents."""


class CheckpointKeysError(CheckpointError):
    """Tensors are missing, unexpected or have other shapes. Each attribute lists them by name."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


class OutputExistsError(TurboRCMError, FileExistsError):
    """The target already exists or cannot be written to."""


class OutputError(TurboRCMError, OSError):
    """A file could not be written. An existing file is unchanged."""


class MissingPackageError(TurboRCMError, ImportError):
    """An optional package is missing."""


__all__ = [name for name, value in sorted(vars().items()) if isinstance(value, type)]
