"""Every error this library raises on purpose, in one tree.

Each leaf also inherits from the built-in that a caller would have expected, so `except ValueError`
keeps working.
Messages follow one pattern: which argument, what was expected, what came, and what to do about it.
"""

from __future__ import annotations

import textwrap

__all__ = [
    "AlreadyPatchedError",
    "CheckpointError",
    "CheckpointKeysError",
    "ConfigError",
    "ContextParallelError",
    "ControlError",
    "DTypeError",
    "DeviceError",
    "FamilyError",
    "Fp8UnsupportedError",
    "GradientError",
    "HeadDimError",
    "MaskError",
    "MissingPackageError",
    "ModelFolderError",
    "NonFiniteInputError",
    "NotAModelError",
    "NotPatchedError",
    "NothingToPatchError",
    "OpError",
    "OutputError",
    "OutputExistsError",
    "PatchError",
    "RankMismatchError",
    "SamplingError",
    "ShapeError",
    "SignatureDriftError",
    "TableError",
    "TurboRCMError",
    "UnknownArchitectureError",
    "WrappedError",
]


class TurboRCMError(Exception):
    """Base of every error raised on purpose by this library."""

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
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
        """The error as a block a person can read."""
        lines = [f"{type(self).__name__}: {self.what}"]
        for name in ("expected", "got", "remedy"):
            text = getattr(self, name)
            if text:
                lines.append(
                    textwrap.fill(
                        text,
                        96,
                        initial_indent=f"  {name + ':':<10}",
                        subsequent_indent=" " * 12,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                )
        return "\n".join(lines)


class ConfigError(TurboRCMError, ValueError):
    """A field of a configuration has a value outside its domain."""


class TableError(TurboRCMError, ValueError):
    """A table of tiles on disk cannot be used."""


# --- patching ------------------------------------------------------------------------------------


class PatchError(TurboRCMError):
    """Patching or unpatching was refused; the model is as it was before the call."""


class NotAModelError(PatchError, TypeError):
    """The argument is neither a torch module nor a pipeline that holds one."""


class UnknownArchitectureError(PatchError, ValueError):
    """No registered family knows this class."""


class NothingToPatchError(PatchError, ValueError):
    """The family is known, but no pair can be run fused under this configuration."""


class AlreadyPatchedError(PatchError, RuntimeError):
    """The model carries our patch already."""


class NotPatchedError(PatchError, RuntimeError):
    """The model does not carry our patch."""


class WrappedError(PatchError, RuntimeError):
    """Somebody else wrapped a function over ours, so undoing would drop their change."""


class FamilyError(PatchError, RuntimeError):
    """A family cannot serve this instance although its class is known."""


class SignatureDriftError(FamilyError):
    """A forward's signature is not the one the family was written against."""


class ContextParallelError(PatchError, RuntimeError):
    """The model is split over several ranks in a way the fused path does not serve."""


# --- operations ----------------------------------------------------------------------------------


class OpError(TurboRCMError):
    """An operation was called with arguments it cannot honour."""


class ShapeError(OpError, ValueError):
    """Shapes or strides do not fit together."""


class DTypeError(OpError, TypeError):
    """A tensor has a dtype the operation does not take."""


class HeadDimError(OpError, ValueError):
    """head_dim is outside what the kernels are built for."""


class MaskError(OpError, ValueError):
    """A mask of a form that cannot be honoured exactly."""


class DeviceError(OpError, RuntimeError):
    """The requested implementation cannot run on this device."""


class Fp8UnsupportedError(DeviceError):
    """fp8 was asked for on a device without fp8 matrix units (below sm_89)."""


class GradientError(OpError, RuntimeError):
    """A gradient was asked for that the operation does not define."""


class RankMismatchError(OpError, ValueError):
    """Ranks that share one sequence disagree about an operation; raised on each of them."""


class NonFiniteInputError(OpError, ValueError):
    """The guard saw a NaN or an infinity before any of our code had run."""


# --- sampling ------------------------------------------------------------------------------------


class SamplingError(TurboRCMError):
    """Generating or comparing videos failed."""


class ModelFolderError(SamplingError, OSError):
    """The path or id does not lead to a pipeline that can be loaded."""


class ControlError(SamplingError, RuntimeError):
    """The control run is bit-equal to the baseline, so it measures nothing."""


# --- checkpoints ---------------------------------------------------------------------------------


class CheckpointError(TurboRCMError, ValueError):
    """A checkpoint or a converted folder cannot be read, or is not what it should be."""


class CheckpointKeysError(CheckpointError):
    """Tensors are missing, unexpected or of other shapes; each attribute lists all of its kind."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


class OutputExistsError(TurboRCMError, FileExistsError):
    """What would be written is there already, or its place cannot be written to."""


class OutputError(TurboRCMError, OSError):
    """A file could not be written; what was in its place is as it was."""


class MissingPackageError(TurboRCMError, ImportError):
    """An optional package is needed for what was asked."""
