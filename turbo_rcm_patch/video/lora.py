"""LoRAs of a pipeline: load them with diffusers' own loader, and say which a pipeline has."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
_log = logging.getLogger(__name__)
_FORM: Final = "PATH_OR_ID or PATH_OR_ID:SCALE, with 'transformer=' or 'transformer_2=' before it "
_EXAMPLE: Final = "owner/name/folder/file.safetensors"


@dataclass(frozen=True, slots=True)
class LoRA:
    """A LoRA to be loaded.

    Attributes:
        text: As it was given, `[PART=]PATH_OR_ID[:SCALE]`.
        source: A file, a folder, or a hub id.
        file: The file inside a hub's repository, else "".
        scale: The factor of its update.
        parts: The transformers that get it: "transformer" (the high-noise expert of Wan 2.2),
            "transformer_2" (the low-noise expert).
    """

    text: str
    source: str
    file: str
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
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("lora", expected=_FORM.strip(), got=repr(text))
    part, equals, source = text.partition("=")
    parts: tuple[str, ...] = (part,) if equals and part in COMPONENTS else ()
    source, scale = source if parts else text, 1.0
    if not Path(source).expanduser().exists():
        before, colon, after = source.rpartition(":")
        if colon and not {"/", "\\"} & {*after}:  # Else the colon is of a drive.
            source, scale = before, _read_scale(text, after)
    name = source.lower().replace("\\", "/").rpartition("/")[2] or source
    parts = parts or tuple(
        expert for expert, marks in _EXPERTS.items() if any(mark in name for mark in marks)
    )
    path = Path(source).expanduser()
    if path.exists():
        return LoRA(text, str(path), "", scale, parts or COMPONENTS)
    owner = source.split("/")
    hub_id, file = "/".join(owner[:2]), "/".join(owner[2:])
    if not HUB_ID.fullmatch(hub_id) or hub_id.endswith(".safetensors"):
        expected = f"a .safetensors file, a folder with one, or {_EXAMPLE} on the hub"
        what, remedy = f"no such LoRA: {path}", "Check the spelling"
        raise ModelFolderError(what, expected=expected, remedy=remedy)
    return LoRA(text, hub_id, file, scale, parts or COMPONENTS)


def _read_scale(text: str, scale: str) -> float:
    with suppress(ValueError):
        if math.isfinite(float(scale)):
            return float(scale)
    expected = "a finite number after the colon"
    raise ConfigError(f"scale of the LoRA {text!r}", expected=expected, got=scale)


def check_loras(loras: Sequence[str]) -> list[LoRA]:
    """Read what `add_loras` is given, before a model is loaded.

    Raises:
        ConfigError: An entry has another form.
        ModelFolderError: There is no such file.
        MissingPackageError: peft is not installed.
    """
    if isinstance(loras, str):
        raise ConfigError("lora", expected="a tuple of texts", got=repr(loras))
    wanted = [parse_lora(text) for text in loras]
    if wanted:
        require("lora", "a LoRA", "peft")
    return wanted


def add_loras(pipe: Any, loras: Sequence[str]) -> None:
    """Load LoRAs with the pipeline's own loader, beside the weights and not fused.

    A Linear with a LoRA is called as before, so `linear="int8"` runs its base in int8 and the
    low-rank side in 16 bits.

    Args:
        pipe: A pipeline that is not patched. Its Linears become peft's, which call the old ones.
        loras: Each `[PART=]PATH_OR_ID[:SCALE]` (`parse_lora`). LoRAs that the pipeline has already
            stay active with their scales.

    Raises:
        ConfigError: An entry has another form, or names an expert that the pipeline lacks.
        ModelFolderError: A file is missing, or fits no transformer of the pipeline. None of the
            LoRAs is loaded then.
        MissingPackageError: peft is not installed.
    """
    wanted, networks = check_loras(loras), networks_of(pipe)
    for lora in wanted:
        if not networks.keys() & {*lora.parts}:
            expected = f"a LoRA for one of {[*networks]}, which a {type(pipe).__name__} has"
            got = f"one for {' and '.join(lora.parts)}"
            remedy = "Write transformer=FILE to load it anyway"
            raise ConfigError(f"lora {lora.text!r}", expected=expected, got=got, remedy=remedy)
    before = {part: _names(network) for part, network in networks.items()}
    try:
        for part, network in networks.items():
            scales = _active(network)
            for lora in wanted:
                if part in lora.parts:
                    scales[_load(pipe, lora, part)] = lora.scale
            if scales:
                network.set_adapters([*scales], [*scales.values()])
    except BaseException:
        for part, network in networks.items():
            loaded = [name for name in _names(network) if name not in before[part]]
            if loaded and before[part]:
                network.delete_adapters(loaded)
            elif loaded:
                network.unload_lora()
        raise


def _names(network: Any) -> list[str]:
    """Return the names of a transformer's LoRAs, active or not."""
    return [*getattr(network, "peft_config", {})]


def _load(pipe: Any, lora: LoRA, part: str) -> str:
    """Load a LoRA into a transformer, name the weights that have no effect, and return the name
    under which peft has it."""
    network = networks_of(pipe)[part]
    name = f"lora_{len(_names(network))}"
    folder, _, file = lora.file.rpartition("/")
    files: dict[str, Any] = {"weight_name": file, "subfolder": folder or None} if file else {}
    path = Path(lora.source)
    for there in [*path.iterdir()] if path.is_dir() else [path]:
        if not there.is_dir():
            check_regular(there, ModelFolderError)
    with loading(
        ModelFolderError,
        f"LoRA {lora.text!r} could not be loaded into {part}",
        expected=f"LoRA weights of a {type(network).__name__} of this size: a "
        f".safetensors file, a folder with one, or {_EXAMPLE} on the hub",
        remedy="Check that it was made for this model",
    ):
        weights, notes = pipe.lora_state_dict(lora.source, return_lora_metadata=True, **files)
        _refuse_patterns(notes or {})
        second = {"load_into_transformer_2": True} if part == "transformer_2" else {}
        pipe.load_lora_weights(lora.source, adapter_name=name, **second, **files)
        used = {
            f"transformer.{where}"
            for where, module in network.named_modules()
            if name in getattr(module, "lora_A", {})
        }
        unused = sorted(key for key in weights if key.partition(".lora_")[0] not in used)
        if len(unused) == len(weights):
            raise ValueError("none of its weights is this model's")
    if unused:
        _log.warning(
            "LoRA %r: %d of its %d weights fit the %s. These have no effect: %s",
            lora.text,
            len(weights) - len(unused),
            len(weights),
            part,
            ", ".join(map(ascii, unused[:8])),
        )
    return name


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
        Each "transformer: SCALE x DIGEST"; the digest is of its weights.
    """
    loras = []
    for part, network in networks_of(pipe).items():
        for name, scale in _active(network).items():
            digest = hashlib.blake2b(digest_size=8)
            for key, weight in sorted(network.named_parameters()):
                if f".{name}." in f"{key}." and "lora_" in key and not weight.is_meta:
                    digest.update(f"{key.replace(name, '')} {fingerprint(weight)}".encode())
            loras.append(f"{part}: {scale:g} x {digest.hexdigest()}")
    return tuple(loras)


def _active(network: Any) -> dict[str, float]:
    """Return the active LoRAs of a transformer with their scales, as `set_adapters` takes them."""
    scales: dict[str, float] = {}
    if not getattr(network, "peft_config", {}):
        return scales
    from peft.tuners.lora import LoraLayer

    for module in network.modules():
        if isinstance(module, LoraLayer) and not module.disable_adapters:
            for name in {*module.active_adapters} & module.scaling.keys():
                rank = module.r[name]
                usual = module.lora_alpha[name] / (rank**0.5 if module.use_rslora[name] else rank)
                scales.setdefault(name, module.scaling[name] / usual)
    return scales
