"""Attach SLA's `proj_l`, which stock classes have no place for, to a loaded transformer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from turbo_rcm_patch.checkpoints.extra_file import (
    EXTRA_FILE,
    check_mark,
    folder_proj_l,
    mark_of,
    mark_of_tensors,
)
from turbo_rcm_patch.errors import AlreadyPatchedError, CheckpointError
from turbo_rcm_patch.patching.record import record_of
from turbo_rcm_patch.patching.sla import MARK, attach_proj_l, detach_proj_l, held_proj_l


@dataclass(frozen=True, slots=True)
class Extra:
    """The tensors that `load_extra` attached.

    Attributes:
        path: The file, or the folder that has them among its weights.
        proj_l: Names of the attentions with SLA's projection.
    """

    path: Path
    proj_l: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: proj_l of {len(self.proj_l)} attentions"


def load_extra(transformer: nn.Module, folder: str | Path) -> Extra:
    """Attach the `proj_l` of a converted folder to the transformer that was loaded from it.

    They become buffers of the self-attention of each block, named in `PROJ_L`, and a patched
    transformer then runs SLA there. They move with the model. They are not in its state dict, so
    `save_pretrained` does not write them: copy the folder's `EXTRA_FILE` beside the saved weights.
    Outputs do not change until the transformer is patched. `unload_extra` removes them. Load
    first, then patch: patching has already chosen how each attention runs.

    Args:
        transformer: diffusers' WanTransformer3DModel.
        folder: The transformer folder, or the pipeline folder with it. The `proj_l` may also be
            among the weights, as in folders that other programs converted.

    Returns:
        The names of the modules that it attached to.

    Raises:
        AlreadyPatchedError: The transformer is patched.
        CheckpointError: There are no `proj_l`, or they belong to other weights.

    After an error nothing has changed.
    """
    place = transformer_folder(folder)
    path = place / EXTRA_FILE
    mark = mark_of(getattr(transformer, "config", None))
    proj_l = folder_proj_l(place)
    if not proj_l:
        raise CheckpointError(
            f"{place} has no proj_l in {EXTRA_FILE}",
            expected="a folder that `python -m turbo_rcm_patch convert` wrote from a checkpoint "
            "with SLA",
        )
    check_mark(place, proj_l, mark)
    modules = dict(transformer.named_modules())
    for name, (weight, _) in proj_l.items():
        module = modules.get(name)
        heads = getattr(module, "heads", None)
        width = getattr(getattr(module, "to_v", None), "out_features", 0)
        if not heads or tuple(weight.shape) != (width // heads,) * 2:
            raise CheckpointError(
                f"{place}: {name}",
                expected=f"attention with heads of {max(weight.shape, default=0)} channels",
                got="no such module" if module is None else f"a {type(module).__name__}",
            )
    if record_of(transformer) is not None:
        raise AlreadyPatchedError(
            f"{place}: proj_l of {len(proj_l)} attentions",
            expected="a transformer that is patched after its proj_l is attached",
            got="a patched one",
            remedy="Call unload_extra or unpatch_model, then load_extra, then patch_model",
        )
    _mark(transformer, mark_of_tensors(proj_l))
    for name, (weight, bias) in proj_l.items():
        attach_proj_l(modules[name], weight, bias)
    return Extra(path if path.is_file() else place, tuple(proj_l))


def unload_extra(transformer: nn.Module) -> None:
    """Remove the `proj_l` that `load_extra` attached.

    A patched transformer runs dense attention from its next forward on. So does one that is
    patched later: its configuration says that dense attention is meant.
    """
    if held_proj_l(transformer) or mark_of(getattr(transformer, "config", None)):
        _mark(transformer, None)
    for module in transformer.modules():
        detach_proj_l(module)


def transformer_folder(folder: str | Path) -> Path:
    """Find the transformer's folder, given that folder or its pipeline's.

    Raises:
        CheckpointError: There is none, or a pipeline's folder has two.
    """
    root = Path(folder)
    if (root / "transformer_2" / "config.json").is_file():
        raise CheckpointError(
            f"{root} has two experts",
            expected="the folder of one",
            remedy=f"Choose {root / 'transformer'} or {root / 'transformer_2'}",
        )
    for path in (root, root / "transformer"):
        if (path / "config.json").is_file() and not (path / "model_index.json").is_file():
            return path
    raise CheckpointError(
        f"{root} has no config.json",
        expected="a transformer folder of diffusers, or a pipeline folder with one",
    )


def _mark(transformer: nn.Module, mark: object) -> None:
    """Record in a diffusers model's configuration which `proj_l` belong to it; None: dense is
    meant. A model whose marked `proj_l` are missing is not patched."""
    register = getattr(transformer, "register_to_config", None)
    if register is not None:
        register(**{MARK: mark})
