"""What the guard chose for a model, kept in a file beside it.

For every pair that runs otherwise than it was configured, a calibration holds its exact heads, the
precision of its attention, and whether its int8 Linears, or all of it, were given back. It belongs
to weights, so the file has a fingerprint of the model's class, of the names, shapes and dtypes of
its parameters, of some of their values, and of SLA's attached `proj_l`. Ranks that shard a model
have other values each, so those of a sharded model are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.output import write_json
from turbo_rcm_patch.patching.registry import author_class
from turbo_rcm_patch.patching.sla import held_proj_l
from turbo_rcm_patch.patching.state import SPARSE, ModelPlan, PairState, Precise
from turbo_rcm_patch.patching.stored import mark_of_tensors

_FORMAT: Final = 1
#: Values of each parameter that go into the fingerprint.
_SAMPLES: Final = 16
#: What a calibration says of a pair by true.
_FLAGS: Final = ("linears given back", "given back")


def fingerprint(model: nn.Module) -> str:
    """Two digests of a model: of some values of its parameters, and of its class with the names
    and shapes of them.

    What is offloaded sequentially is read where it is; meta tensors count by name, shape and dtype
    alone. The first digest is empty where several ranks have parts of the weights: each has other
    values, and after a forward some are whole.
    """
    values = hashlib.sha256(author_class(model).__qualname__.encode())
    form, sharded = values.copy(), False
    for name, parameter in sorted(model.named_parameters()):
        form.update(f"{name} {list(parameter.shape)}".encode())
        values.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        held: Tensor | None = parameter
        if parameter.is_meta:
            place, _, own = name.rpartition(".")
            held = _offloaded(model.get_submodule(place), own)
        sharded = sharded or hasattr(held, "device_mesh")
        if held is not None and held.numel() and not sharded:
            values.update(_some_of(held))
    proj_l = held_proj_l(model)
    if proj_l:  # They are buffers, and decide which attention it is.
        for digest in (values, form):
            digest.update(repr(mark_of_tensors(proj_l)).encode())
    return f"{'' if sharded else values.hexdigest()}/{form.hexdigest()}"


def _same(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same weights, as far as both say."""
    (values, form), (others, same) = (each.partition("/")[::2] for each in (one, other))
    return values == others if values and others else form == same != ""


def _offloaded(module: nn.Module, name: str) -> Tensor | None:
    """A parameter that accelerate's hook has put elsewhere; None where there is none."""
    hook: Any = module.__dict__.get("_hf_hook")
    for one in (hook, *getattr(hook, "hooks", ())):
        try:
            value = getattr(one, "weights_map", None) or {}
            found = value[name]
        except KeyError:
            continue
        return found if isinstance(found, Tensor) else None
    return None


def _some_of(x: Tensor) -> bytes:
    if type(x) is not nn.Parameter and type(x) is not Tensor:
        # Quantised: what can be asked of all of them is a sum.
        return f"{float(x.detach().float().sum()):.6g}".encode()
    flat = x.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
    return some.to("cpu", torch.float64).numpy().tobytes()


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
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for plan in plans:
        states = {state.pair.path: state for state in plan.states}
        weights = fingerprint(plan.model)
        # A model may be patched by itself now, and have been a part of a pipeline then.
        places = [at for at, kept in models.items() if _same(kept["fingerprint"], weights)]
        if not places:
            where = plan.path or "the model"
            raise _refused(path, f"another fingerprint than that of {where}", "these weights")
        place = plan.path if plan.path in places else places[0]
        for name, chosen in models[place]["pairs"].items():
            own = name.removeprefix(place).removeprefix(".")
            here = ".".join(filter(None, (plan.path, own)))
            if here not in states:
                raise _refused(path, f"a pair {name!r}", "pairs of this model")
            sparse = any(f"{here}{end}" in states for end in SPARSE)
            heads = 0 if sparse else states[here].pair.heads  # No part of it runs exactly.
            found[plan.path, here] = _checked(path, chosen, heads)
    return Calibration(path.name, found)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        models = document["models"]
        known = document["turbo_rcm_patch_calibration"] == _FORMAT
        whole = all({"fingerprint", "pairs"} <= set(one) for one in models.values())
        if not (known and whole and all(isinstance(m["pairs"], dict) for m in models.values())):
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
        and all(type(chosen.get(name, True)) is bool for name in _FLAGS)
        and set(chosen) <= {"exact_heads", "precision", *_FLAGS}
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
