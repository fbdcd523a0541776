"""Bad calls: a typed error that says what to do, and a model that is as it was."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching import turbodiffusion
from tests.patching.models import TURBOS, dicts, named
from tests.patching.test_changes import offload
from turbo_rcm_patch import PatchConfig, is_patched, patch_model, refresh, report_of, unpatch_model
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    CheckpointError,
    ConfigError,
    DeviceError,
    DTypeError,
    FamilyError,
    Fp8UnsupportedError,
    MissingPackageError,
    NotAModelError,
    NothingToPatchError,
    NotPatchedError,
    OffloadedError,
    ShapeError,
    UnknownArchitectureError,
)


def keywords(**options: Any) -> Callable[[Any], object]:
    return lambda model: patch_model(model, **options)


def subclass(model: Any) -> None:
    kind = type("Derived", (type(model),), {})
    model.__class__ = kind
    patch_model(model)


def odd_heads(model: Any) -> None:
    model.blocks[0].attn1.inner_dim = 126 + 1
    patch_model(model)


def in_fp64(model: Any) -> None:
    patch_model(model.double())


def in_fp8(model: Any) -> None:
    model.blocks.to(torch.float8_e4m3fn)
    patch_model(model)


def int8_only_over_casting(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    patch_model(model, linear="int8-only")


def int8_only_under_offloading(model: Any) -> None:
    offload("leaf_level")(model)
    patch_model(model, linear="int8-only")


def pipe_after_transformer(model: Any) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    try:
        patch_model(model)
        patch_model(SimpleNamespace(transformer=model, vae=vae))
    finally:
        unpatch_model(model)


def lost_proj_l(model: Any) -> None:
    model.register_to_config(_turbo_rcm_sla={"count": 2, "digest": "0"})
    patch_model(model)


def other_signature(model: Any) -> None:
    kind = type(model.blocks[0])
    own = kind.forward
    newer = FunctionType(
        (lambda self, hidden_states, text, temb, rotary_emb, more=None: None).__code__,
        own.__globals__,  # as if another version of diffusers had defined it
    )
    try:
        kind.forward = newer
        patch_model(model)
    finally:
        kind.forward = own


def every_block_replaced(model: Any) -> None:
    for block in model.blocks:
        block.forward = SimpleNamespace()
    try:
        patch_model(model)
    finally:
        for block in model.blocks:
            del block.forward


CASES: list[tuple[str, Callable[[Any], object], type[Exception], str]] = [
    ("a negative target", keywords(fidelity=-1.0), ConfigError, "positive"),
    ("kernels without a GPU", keywords(impl="triton"), DeviceError, 'impl="auto"'),
    ("one launch of exact attention", keywords(form="one-launch", attention="exact"), ConfigError,
     "int8"),
    ("sage without a GPU", keywords(attention="sage"), (DeviceError, MissingPackageError),  # type: ignore[list-item]
     "int8"),
    ("a number", lambda m: patch_model(3), NotAModelError, "pipe.transformer"),
    ("a module of no family", lambda m: patch_model(nn.Linear(2, 2)), UnknownArchitectureError,
     "WanTransformer3DModel"),
    ("a subclass", subclass, UnknownArchitectureError, "subclass"),
    ("odd heads", odd_heads, ShapeError, "even number"),
    ("fp64", in_fp64, DTypeError, "bfloat16"),
    ("fp8", in_fp8, DTypeError, "enable_layerwise_casting"),
    ("int8 alone over fp8", int8_only_over_casting, DTypeError, "blocks.0.attn1.to_q.weight"),
    ("int8 alone under offloading", int8_only_under_offloading, OffloadedError, "enable"),
    ("a pipeline after its transformer", pipe_after_transformer, AlreadyPatchedError,
     "patch_model(pipe.vae)"),
    ("SLA without its proj_l", lost_proj_l, CheckpointError, "load_extra"),
    ("another signature", other_signature, FamilyError, "Install a version of diffusers"),
    ("nothing to fuse", every_block_replaced, NothingToPatchError, "replaced by other"),
    ("a report of no patch", report_of, NotPatchedError, "same model"),
    ("a report of no family", lambda m: report_of(nn.Linear(2, 2)), UnknownArchitectureError,
     "WanTransformer3DModel"),
    ("refreshing no patch", refresh, NotPatchedError, "same model"),
    ("undoing no patch", unpatch_model, NotPatchedError, "same model"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "kind", "words"), CASES, ids=[c[0] for c in CASES])
def test_a_refusal_names_the_remedy_and_changes_nothing(
    name: str, call: Callable[[Any], object], kind: type[Exception], words: str
) -> None:
    model = named("t2v").model()
    with pytest.raises(kind) as raised:
        call(model)
    assert words in str(raised.value)
    assert not is_patched(model)
    assert type(model.blocks[0].attn1.to_q) is nn.Linear
    if "int8 alone" not in name:  # hooks of diffusers stand there
        assert not any("forward" in attributes for attributes in dicts(model).values())
    assert "_turbo_rcm_patch" not in vars(model)


@pytest.mark.parametrize("name", [
    "WanAttentionBlock", "WanSelfAttention", "MinimalA2AAttnOp", "WanT2VCrossAttention",
    "WanI2VCrossAttention", "SparseLinearAttention", "SageSparseLinearAttention", "WanLayerNorm",
    "WanRMSNorm", "FastLayerNorm", "FastRMSNorm",
])  # fmt: skip
def test_another_signature_of_any_class_of_turbodiffusion_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [one.model() for one in TURBOS]
    has = [m for m in models if name in {type(part).__name__ for part in m.modules()}]
    kind = getattr(turbodiffusion, name)
    newer = FunctionType((lambda self, more: None).__code__, kind.forward.__globals__)
    monkeypatch.setattr(kind, "forward", newer)
    with pytest.raises(FamilyError, match="TurboDiffusion"):
        patch_model(has[0])


def test_fp8_by_name_is_refused_on_a_card_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    model = named("t2v").model()
    model.blocks[0].attn1.__dict__["_hf_hook"] = SimpleNamespace(execution_device="cuda:0")
    with pytest.raises(Fp8UnsupportedError, match='pv="auto"'):
        patch_model(model, pv="fp8")


def test_a_configuration_shows_what_was_chosen() -> None:
    assert repr(PatchConfig()) == "PatchConfig()"
    assert repr(PatchConfig(pv="bf16", guard=False)) == "PatchConfig(pv='bf16', guard=False)"
    assert hash(PatchConfig()) == hash(PatchConfig())
