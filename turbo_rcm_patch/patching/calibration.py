"""What the guard chose for a model, kept in a file beside it.

For every pair that runs otherwise than it was configured, a calibration holds its exact heads, the
precision of its attention, and whether its int8 Linears were given back. It belongs to weights, so
the file has a fingerprint of the model's class, of the names, shapes and dtypes of its parameters,
and of some of their values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import nn

from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.output import write_json
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.state import ModelPlan, PairState, Precise

_FORMAT: Final = 1
#: Values of each parameter that go into the fingerprint.
_SAMPLES: Final = 16


def fingerprint(model: nn.Module) -> str:
    """A digest of a model: its class, and its parameters with some of their values. Values that
    are not there (on the meta device, offloaded) do not count."""
    digest = hashlib.sha256(author_class(model).__qualname__.encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        if parameter.is_meta or not parameter.numel():
            continue
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        digest.update(some.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def write_calibration(
    path: Path,
    models: Sequence[tuple[str, nn.Module, Sequence[PairState], str | None]],
    about: object,
) -> None:
    """Write what was chosen for some models, whole or not at all.

    Args:
        path: The file, JSON.
        models: Where each sits in what was patched, the model, its pairs, and the fingerprint of
            its weights where that is not the one of now.
        about: Goes to the file, for a reader.
    """
    kept = {
        place: {
            "fingerprint": weights or fingerprint(model),
            "pairs": {s.pair.path: s.chosen for s in states if s.chosen},
        }
        for place, model, states, weights in models
    }
    document = {"turbo_rcm_patch_calibration": _FORMAT, "about": about, "models": kept}
    write_json(path, document)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A file that fits some models.

    Attributes:
        name: Of the file.
        chosen: What it says of a pair, by the places of its model and of itself.
    """

    name: str
    chosen: Mapping[tuple[str, str], Mapping[str, Any]]

    def apply(self, plans: Sequence[ModelPlan]) -> None:
        """Set the pairs of these models."""
        for plan in plans:
            for state in plan.states:
                chosen = self.chosen.get((plan.path, state.pair.path), {})
                state.choose(chosen, f"as calibrated ({self.name})")


def read_calibration(path: Path, plans: Sequence[ModelPlan]) -> Calibration:
    """A calibration of these models, which are as they came.

    Raises:
        ConfigError: The file cannot be read, or is of other models.
    """
    models = _read(path)
    if sorted(models) != sorted(plan.path for plan in plans):
        raise _refused(path, f"models {sorted(models)}", "one for each model that is patched")
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for plan in plans:
        kept = models[plan.path]
        states = {state.pair.path: state for state in plan.states}
        if kept["fingerprint"] != fingerprint(plan.model):
            where = plan.path or "the model"
            raise _refused(path, f"another fingerprint than that of {where}", "these weights")
        for name, chosen in kept["pairs"].items():
            if name not in states:
                raise _refused(path, f"a pair {name!r}", "pairs of this model")
            found[plan.path, name] = _checked(path, chosen, states[name].pair.heads)
    return Calibration(path.name, found)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        models = document["models"]
        known = document["turbo_rcm_patch_calibration"] == _FORMAT
        if not known or not all({"fingerprint", "pairs"} <= set(one) for one in models.values()):
            raise ValueError("another format")
        return dict(models)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _refused(path, str(error), "a file of report.save_calibration") from error


def _checked(path: Path, chosen: Any, heads: int) -> Mapping[str, Any]:
    exact = chosen.get("exact_heads", []) if isinstance(chosen, dict) else None
    good = (
        isinstance(exact, list)
        and all(type(h) is int and 0 <= h < heads for h in exact)
        and chosen.get("precision", "as asked for") in get_args(Precise)
        and type(chosen.get("linears given back", True)) is bool
        and set(chosen) <= {"exact_heads", "precision", "linears given back"}
    )
    if not good:
        raise _refused(path, repr(chosen)[:80], f"heads below {heads} and a known precision")
    return dict(chosen)


def _refused(path: Path, got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"PatchConfig.calibration={str(path)!r}",
        expected=expected,
        got=got,
        remedy='Calibrate again: patch with precision="auto" and without a calibration, run the '
        "model, then report.save_calibration(path)",
    )
