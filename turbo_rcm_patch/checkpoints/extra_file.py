"""Read the files of a transformer folder: weights, and SLA's `proj_l` beside them.

Stock classes have no place for `proj_l`, so these are in a file of their own, `EXTRA_FILE`, and
the entry `MARK` of config.json says how many there are, with a digest. diffusers carries entries
that begin with an underscore through `from_pretrained` and `save_pretrained`, so a model that lost
its `proj_l`, or has those of another expert, is recognised. Folders that others converted have
the `proj_l` among the weights, where stock classes drop them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.files import check_regular, read_json, try_json
from turbo_rcm_patch.interrupts import reraise_interrupts
from turbo_rcm_patch.patching.sla import MARK

#: The file of everything that diffusers' class has no place for.
EXTRA_FILE: Final = "turbo_extra.safetensors"
#: The version of the extra file.
EXTRA_METADATA: Final = {"turbo_rcm_patch": "3"}
#: diffusers' name of a file of weights.
WEIGHTS: Final = "diffusion_pytorch_model"

#: SLA's Linear as this library names it, and as others do who kept TurboDiffusion's module names.
_PROJ_L: Final = re.compile(
    r"((?:.+\.)?attn1)(?:\.attn_op)?(?:\.local_attn)?\.proj_l\.(weight|bias)"
)
#: Attention -> weight [D, D] and bias [D].
ProjL = dict[str, tuple[Tensor, Tensor]]


@reraise_interrupts()
def stored_tensors(*files: Path) -> dict[str, Tensor]:
    """Map the tensors of safetensors files into memory: each is read when it is used.

    SLA's Linear has one name, `blocks.N.attn1.proj_l`, however the file calls it.

    Raises:
        CheckpointError: A file is missing or damaged, or two have a tensor of the same name.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in files:
        check_regular(path, CheckpointError)
        try:
            opened: Any = safe_open(path, framework="pt")
            stored = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is missing, damaged or incomplete ({error})",
                remedy="Write or download it again",
            ) from error
        for key, tensor in stored.items():
            sla = _PROJ_L.fullmatch(key)
            name = f"{sla[1]}.proj_l.{sla[2]}" if sla else key
            if name in tensors:
                raise CheckpointError(
                    f"{path}: {key} occurs twice",
                    expected="each tensor once in the files of a folder",
                    remedy="Remove the files that do not belong to it",
                )
            tensors[name] = tensor
    return tensors


def proj_l_of(tensors: Mapping[str, Tensor]) -> ProjL:
    """Take SLA's projections out of some tensors, in their dtype.

    Raises:
        CheckpointError: One lacks its weight or its bias.
    """
    linears = [key.rpartition(".")[0] for key in tensors if ".proj_l." in key]
    result: ProjL = {}
    for linear in dict.fromkeys(linears):
        weight, bias = (tensors.get(f"{linear}.{part}") for part in ("weight", "bias"))
        if weight is None or bias is None:
            raise CheckpointError(linear, expected="a weight and a bias", got="one of them")
        result[linear.removesuffix(".proj_l")] = weight, bias
    return result


def weight_files(folder: Path) -> list[Path]:
    """The files of weights; another variant may lie beside those that the index names.

    Raises:
        CheckpointError: The index is damaged, or names files elsewhere.
    """
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if not index.is_file():
        return [folder / f"{WEIGHTS}.safetensors"]
    names: Any = read_json(index).get("weight_map")
    names = list(names.values()) if isinstance(names, dict) and names else [names]
    for name in names:
        # By name, not by where a link leads: the hub's cache keeps its files elsewhere.
        plain = isinstance(name, str) and name.endswith(".safetensors")
        if not plain or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{index}: weight_map",
                expected="names of safetensors files in the same folder",
                got=repr(name)[:120],
                remedy="Do not use this folder unless you know who wrote it, and why",
            )
    return sorted({folder / name for name in names})


def folder_proj_l(folder: Path) -> ProjL:
    """Read every `proj_l` of a transformer folder, from the extra file or from among the weights.

    Returns:
        By attention ("blocks.0.attn1"), weight [D, D] and bias [D], in the file's dtype; empty if
        there is none.

    Raises:
        CheckpointError: A file is damaged, or a weight lacks its bias.
    """
    extra = folder / EXTRA_FILE
    proj_l = proj_l_of(stored_tensors(extra)) if extra.is_file() else {}
    if proj_l:
        return proj_l
    files = [path for path in weight_files(folder) if path.is_file()]
    return proj_l_of(stored_tensors(*(files or sorted(folder.glob(f"{WEIGHTS}*.safetensors")))))


def mark_of_tensors(proj_l: ProjL) -> dict[str, object]:
    """The mark of some `proj_l`: how many, and a digest of their values in fp32.

    Args:
        proj_l: By attention, weight [D, D] and bias [D] of any float dtype.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(proj_l):
        digest.update(name.encode())
        for part in proj_l[name]:
            values = part.detach().to("cpu", torch.float32).contiguous()
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return {"count": len(proj_l), "digest": digest.hexdigest()}


def mark_of(config: object) -> Any:
    """The mark in a model's configuration: None if dense is meant, "" if there is none."""
    get: Callable[..., Any] | None = getattr(config, "get", None)
    return "" if get is None else get(MARK, "")


def check_mark(folder: Path, proj_l: ProjL, mark: object) -> None:
    """Compare the `proj_l` of a folder with its config.json and with a model's configuration.

    Args:
        folder: The transformer folder.
        proj_l: The `proj_l` that `folder_proj_l` found there.
        mark: The mark (`mark_of`) of the model that they are for.

    Raises:
        CheckpointError: They belong to other weights.
    """
    actual, of_folder = mark_of_tensors(proj_l), mark_of(try_json(folder / "config.json"))
    expected = ""
    if of_folder and of_folder != actual:
        expected = "those that config.json beside it marks"
    elif not of_folder and (folder / EXTRA_FILE).is_file():
        expected = "none: config.json marks none, so other weights have left them there"
    elif isinstance(mark, Mapping) and mark != actual:
        expected = "those that the model's configuration marks; of two experts each has its own"
    if expected:
        raise CheckpointError(
            f"{folder}: proj_l of {len(proj_l)} attentions",
            expected=expected,
            got=f"digest {actual['digest']}",
            remedy="Pass the folder that the model was converted to, or convert it again. Remove "
            f"{EXTRA_FILE} if it does not belong to the weights",
        )
