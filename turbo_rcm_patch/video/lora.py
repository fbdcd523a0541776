"""LoRAs of a pipeline: load them with diffusers' own loader, and name what has no effect."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from turbo_rcm_patch.errors import ConfigError, ModelFolderError
from turbo_rcm_patch.extras import require
from turbo_rcm_patch.files import check_regular
from turbo_rcm_patch.patching.find import COMPONENTS
from turbo_rcm_patch.video.loading import HUB_ID, loading
from turbo_rcm_patch.video.pipelines import networks_of
from turbo_rcm_patch.video.scheduler import fingerprint

#: Parts of a file's name that say for which expert of Wan 2.2 it is.
_EXPERTS: Final = {
    "transformer": ("high_noise", "high-noise", "highnoise"),
    "transformer_2": ("low_noise", "low-noise", "lownoise"),
}
#: The names of modules in the metadata of a LoRA, which peft takes for regular expressions.
_NAME: Final = re.compile(r"[\w.^$\\-]*")
#: The name under which diffusers saves a LoRA.
_USUAL: Final = "pytorch_lora_weights.safetensors"
_log = logging.getLogger(__name__)
#: A part, a source, and a scale; a colon before a slash is of a drive or an address.
_FORM: Final = re.compile(r"(?:(transformer(?:_2)?)=)?(.*?\S.*?)(?::([^:/\\]*))?")
_FORM_TEXT: Final = (
    "PATH_OR_ID or PATH_OR_ID:SCALE, with 'transformer=' or 'transformer_2=' before it"
)
_FILES: Final = (
    "a .safetensors file, a folder with one, or owner/name/folder/file.safetensors on the hub"
)


@dataclass(frozen=True, slots=True)
class LoRA:
    """A LoRA to be loaded.

    Attributes:
        text: As it was given, `[PART=]PATH_OR_ID[:SCALE]`.
        source: A file, a folder, or `owner/name[/file]` on the hub.
        scale: The factor of its update.
        parts: The transformers that get it: "transformer" (the high-noise expert of Wan 2.2),
            "transformer_2" (the low-noise expert).
    """

    text: str
    source: str
    scale: float
    parts: tuple[str, ...]


def parse_lora(text: str) -> LoRA:
    """Read `[PART=]PATH_OR_ID[:SCALE]`.

    Without a part, a name with "high_noise" or "low_noise" in it goes to that expert, any other to
    all transformers of the pipeline.

    Raises:
        ConfigError: It has another form, or the scale is not a finite number.
        ModelFolderError: There is no such file, and it cannot be a hub id.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise ConfigError("lora", expected=_FORM_TEXT, got=repr(text))
    part, source, scale = form.groups(default="")
    if not _is_finite(scale or "1"):
        expected = "a finite number after the colon"
        raise ConfigError(f"scale of the LoRA {text!r}", expected=expected, got=scale)
    name = source.lower().replace("\\", "/").rpartition("/")[2] or source
    parts = (
        (part,)
        if part
        else tuple(
            expert for expert, marks in _EXPERTS.items() if any(mark in name for mark in marks)
        )
    )
    path = Path(source).expanduser()
    if path.exists():
        source = str(path)
    else:
        repository = "/".join(source.split("/")[:2])
        if not HUB_ID.fullmatch(repository) or repository.endswith(".safetensors"):
            what, remedy = f"no such LoRA: {path}", "Check the spelling"
            raise ModelFolderError(what, expected=_FILES, remedy=remedy)
    return LoRA(text, source, float(scale or 1), parts or COMPONENTS)


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def check_loras(loras: Sequence[str]) -> list[LoRA]:
    """Read what `add_loras` is given, before a model is loaded.

    Raises:
        ConfigError: An entry has another form.
        ModelFolderError: There is no such file.
        MissingPackageError: peft is not installed.
    """
    wanted = [parse_lora(text) for text in loras]
    if wanted:
        require("lora", "a LoRA", "peft")
    return wanted


def add_loras(pipe: Any, loras: Sequence[str]) -> None:
    """Load LoRAs with the pipeline's own loader, beside the weights and not fused.

    A Linear with a LoRA is called as before, so `linear="int8"` runs its base in int8 and the
    low-rank side in 16 bits.

    Args:
        pipe: A pipeline without a LoRA, not patched. Its Linears become peft's, which call the old
            ones.
        loras: Each `[PART=]PATH_OR_ID[:SCALE]` (`parse_lora`).

    Raises:
        ConfigError: An entry has another form, or names an expert that the pipeline lacks.
        ModelFolderError: A file is missing, or fits no transformer of the pipeline.
        MissingPackageError: peft is not installed.
    """
    wanted, networks = check_loras(loras), networks_of(pipe)
    for lora in wanted:
        if not networks.keys() & {*lora.parts}:
            expected = f"a LoRA for one of {[*networks]}, which a {type(pipe).__name__} has"
            got = f"one for {' and '.join(lora.parts)}"
            remedy = "Write transformer=FILE to load it anyway"
            raise ConfigError(f"lora {lora.text!r}", expected=expected, got=got, remedy=remedy)
    for part, network in networks.items():
        scales: dict[str, float] = {}
        for lora in wanted:
            if part in lora.parts:
                name = f"lora_{len(scales)}"
                _load(pipe, lora, part, name)
                scales[name] = lora.scale
        if scales:
            network.set_adapters([*scales], [*scales.values()])


def _load(pipe: Any, lora: LoRA, part: str, name: str) -> None:
    """Load a LoRA under a name of peft's, and warn of weights without effect."""
    network = networks_of(pipe)[part]
    second = {"load_into_transformer_2": True} if part == "transformer_2" else {}
    with loading(
        ModelFolderError,
        f"LoRA {lora.text!r} could not be loaded into {part}",
        expected=f"LoRA weights of a {type(network).__name__} of this size: {_FILES}",
        remedy="Check that it was made for this model",
    ):
        path = _find_file(lora.source)
        with safe_open(path, framework="pt") as file:
            weights = _check_contents(file)
            pipe.load_lora_weights(
                str(path.parent), weight_name=path.name, adapter_name=name, **second
            )
            used = _used_weights(pipe, network, name, [*file.keys()])
            if not used:
                raise ValueError("none of its weights is this model's")
            unused = [key for key in weights if key not in used and file.get_tensor(key).any()]
    if unused:
        _log.warning(
            "LoRA %r: %d of its %d weights fit the %s. These have no effect: %s%s",
            lora.text,
            len(weights) - len(unused),
            len(weights),
            part,
            ", ".join(map(ascii, unused[:8])),
            f" and {len(unused) - 8} more" * (len(unused) > 8),
        )


def _check_contents(file: Any) -> list[str]:
    """Return the names of the weights of an open LoRA file, without their scales.

    Raises:
        ValueError: diffusers would not end with it.
    """
    _refuse_patterns(json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}")))
    scales = [key for key in file.keys() if key.endswith(".alpha")]  # noqa: SIM118 - no dict
    for key in scales:
        if not file.get_tensor(key).item() >= 0:
            raise ValueError(f"{key} is negative or NaN")
    return sorted({*file.keys()} - {*scales})


def _used_weights(pipe: Any, network: Any, name: str, keys: Sequence[str]) -> set[str]:
    """Return the weights of a LoRA's file that change a network.

    diffusers renames the weights of other programs, and drops some without a word. So weights that
    hold nothing but their number are converted once more, with a scale of 1.

    Args:
        pipe: The pipeline.
        network: Its transformer, which has the LoRA.
        name: The name of the LoRA.
        keys: The names in the file.
    """
    numbered = {
        key: torch.ones(()) if key.endswith(".alpha") else torch.full((1, 1), float(number))
        for number, key in enumerate(keys, 2)  # a converter fills in ones
    }
    layers = {
        f"transformer.{where}"
        for where, module in network.named_modules()
        if name in getattr(module, "lora_A", {})
    }
    converted = pipe.lora_state_dict(numbered)
    numbers = {int(converted[key]) for key in converted if key.partition(".lora_")[0] in layers}
    return {key for number, key in enumerate(keys, 2) if number in numbers}


def _find_file(source: str) -> Path:
    """Find the one file of a LoRA: in a folder, or in a repository of the hub."""
    path = Path(source)
    if path.is_dir():
        path /= _only_file(there.name for there in path.iterdir())
    if path.exists():
        check_regular(path, ModelFolderError)
        return path
    from huggingface_hub import hf_hub_download, list_repo_files

    owner, repository, *inside = source.split("/")
    hub_id = f"{owner}/{repository}"
    return Path(hf_hub_download(hub_id, "/".join(inside) or _only_file(list_repo_files(hub_id))))


def _only_file(names: Iterable[str]) -> str:
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if _USUAL in weights:
        return _USUAL
    if len(weights) != 1:
        raise ValueError(f"it has {len(weights)} .safetensors files; name one: {weights[:8]}")
    return weights[0]


def _refuse_patterns(notes: dict[str, Any]) -> None:
    """Refuse regular expressions that peft would match with every name; one can run for hours."""
    for name, value in notes.items():
        kind = name.rpartition(".")[2]
        if not kind.endswith(("_pattern", "_modules")):
            continue
        for text in map(str, [value] if isinstance(value, str) else value or ()):
            if not _NAME.fullmatch(text):
                raise ValueError(f"its metadata has {text[:80]!r} as {kind}, not a plain name")


def loras_of(pipe: Any) -> tuple[str, ...]:
    """Name the active LoRAs of a pipeline, however they were loaded.

    Returns:
        Each "transformer: DIGEST"; the digest is of its weights and scales.
    """
    loras = []
    for part, network in networks_of(pipe).items():
        names = getattr(network, "peft_config", {})
        digests = {name: hashlib.blake2b(digest_size=8) for name in names}
        active = set()
        for where, module in network.named_modules():
            for name in digests.keys() & _active(module):
                active.add(name)
                sides = module.lora_A[name].weight, module.lora_B[name].weight
                weights = [fingerprint(side) for side in sides if not side.is_meta]
                digests[name].update(f"{where} {module.scaling[name]} {weights}".encode())
        loras += [f"{part}: {digests[name].hexdigest()}" for name in digests if name in active]
    return tuple(loras)


def _active(module: Any) -> set[str]:
    """Return the names of the LoRAs that a module adds; none if it is no layer of peft's."""
    if getattr(module, "disable_adapters", True):
        return set()
    return {*module.active_adapters} & getattr(module, "scaling", {}).keys()
