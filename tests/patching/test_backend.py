"""`turbo_rcm_int8` in diffusers' registry, for models without a family, undone exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import (
    AttentionBackendName,
    ContextParallelConfig,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    attention_backend,
)
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import dispatch_attention_fn

from tests.measures import relative_l2
from tests.patching.models import named, run
from tests.ranks import enable_parallelism, on_ranks
from turbo_rcm_patch import diffusers_backend as ours
from turbo_rcm_patch import errors, patch_model, register_backend, unregister_backend

NAME = "turbo_rcm_int8"


def flux() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 12, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(12, 3),
    }


def qwen_image(padded: int = 0) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Padded tokens of text, as for prompts of several lengths, bring a mask."""
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    mask = torch.ones(1, 7, dtype=torch.long)
    mask[:, 7 - padded :] = 0
    return model, {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "encoder_hidden_states_mask": mask if padded else None,
        "timestep": torch.tensor([1.0]),
        "img_shapes": [(1, 4, 4)],
    }


MODELS = {
    "flux": flux,
    "qwen-image": qwen_image,
    "qwen-image-padded": partial(qwen_image, padded=2),
}


def everything() -> list[Any]:
    """All that the registration could leave behind, but for the one function that tells a model
    that still names the backend."""
    names: Any = AttentionBackendName
    tables = [value for value in vars(Registry).values() if isinstance(value, dict | set)]
    kept = [dict(vars(names)), list(names), *map(list, (names._member_map_, *tables))]
    kept += [list(names._value2member_map_), dict(vars(attention_dispatch))]
    kept.append(Registry._active_backend)
    return [[x for x in one if x != NAME] if isinstance(one, list) else one for one in kept]


@pytest.fixture
def registered() -> Iterator[str]:
    yield register_backend()
    unregister_backend()


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    before = everything()
    yield
    assert everything() == before


def forward(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return model.eval()(**inputs, return_dict=False)[0]


def test_registers_once_and_is_undone() -> None:
    assert register_backend() == NAME == register_backend()
    member = AttentionBackendName(NAME)
    assert member is AttentionBackendName.TURBO_RCM_INT8 is AttentionBackendName["TURBO_RCM_INT8"]
    assert isinstance(member, AttentionBackendName) and member == NAME
    assert member in list(AttentionBackendName) and copy.deepcopy(member) is member
    model, inputs = flux()
    exact = forward(model, inputs)
    model.set_attention_backend(NAME)
    assert Registry._active_backend == NAME
    unregister_backend()
    assert Registry._active_backend == "native"
    with pytest.raises(errors.NotPatchedError, match="reset_attention_backend"):
        forward(model, inputs)
    model.reset_attention_backend()
    assert torch.equal(forward(model, inputs), exact)
    with pytest.raises(ValueError, match=NAME):
        model.set_attention_backend(NAME)
    with pytest.raises(errors.NotPatchedError, match="register_backend"):
        unregister_backend()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("int8", [False, True], ids=["exact", "int8"])
@pytest.mark.filterwarnings("ignore:this attention runs exactly:UserWarning")
def test_a_model_without_a_family_runs_through_it(
    name: str, int8: bool, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = MODELS[name]()
    exact = forward(model, inputs)
    model.set_attention_backend(registered)
    if int8:  # These sequences are too short for it.
        monkeypatch.setattr("turbo_rcm_patch.ops.sageattn.INT8_MIN_KEYS", 1)
    with mock.patch.object(ours, "sageattn", mock.Mock(side_effect=ours.sageattn)) as attention:
        out = forward(model, inputs)
    assert attention.call_count == 2  # each of these models has two attentions
    error = relative_l2(out, exact)
    if int8 and name != "qwen-image-padded":
        assert 1e-5 < error < 2e-2
    else:  # no int8 below the limit, nor under a mask
        assert error < 1e-5
    model.reset_attention_backend()


KEYS = (2, 40, 4, 32)
#: Name -> shape of k and v, other arguments, and what a warning says.
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    **{f"{heads}-heads-{scale}{'-causal' * causal}": (
        (2, 33, heads, 32), {"is_causal": causal, "scale": scale, "enable_gqa": heads != 4}, "")
       for heads in (4, 2) for causal in (False, True) for scale in (None, 0.3)},
    "mask-keys": (KEYS, {"attn_mask": torch.rand(2, 1, 1, 40) > 0.4}, "a mask"),
    "mask-keys-of-a-sample": (KEYS, {"attn_mask": torch.rand(2, 40) > 0.4}, "a mask"),
    "mask-added": (KEYS, {"attn_mask": torch.randn(2, 4, 33, 40)}, "a mask"),
    "mask-one-for-all": (KEYS, {"attn_mask": torch.randn(33, 40)}, "a mask"),
    "dropout": (KEYS, {"dropout_p": 0.1}, "dropout"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_native(name: str, registered: str) -> None:
    shape, more, reason = CALLS[name]
    q, k, v = torch.randn(2, 33, 4, 32), torch.randn(shape), torch.randn(shape)
    torch.manual_seed(0)
    native = dispatch_attention_fn(q, k, v, backend="native", **more)
    torch.manual_seed(0)
    said = pytest.warns(UserWarning, match=f"exactly, through torch, because of {reason}")
    with said if reason else nullcontext():
        out = dispatch_attention_fn(q, k, v, backend=registered, **more)
    torch.testing.assert_close(out, native)


def test_a_gradient_is_refused(registered: str) -> None:
    model, inputs = flux()
    with attention_backend(registered), pytest.raises(errors.GradientError, match="torch.no_grad"):
        model(**inputs)


def test_compiles_without_a_break(registered: str) -> None:
    model, inputs = flux()
    model.set_attention_backend(registered)
    eager = forward(model, inputs)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.compile(backend="eager", fullgraph=True)
    assert torch.equal(forward(model, inputs), eager)
    model.reset_attention_backend()


def test_a_name_that_is_taken_is_refused() -> None:
    with (
        mock.patch.dict(AttentionBackendName._value2member_map_, {NAME: object()}),
        pytest.raises(errors.AlreadyPatchedError, match="free"),
    ):
        register_backend()


def test_a_function_put_over_ours_is_refused() -> None:
    register_backend()
    member = AttentionBackendName(NAME)
    with (
        mock.patch.dict(Registry._backends, {member: print}),
        pytest.raises(errors.WrappedError, match="Undo"),
    ):
        unregister_backend()
    unregister_backend()


# --- on a patched model ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["chosen first", "patched first"])
@pytest.mark.parametrize(
    ("name", "form"),
    [("t2v", "model"), ("t2v", "context"), ("t2v", "attn1"), ("t2v", "attn2"),
     ("anyflow-far", "attn2"), ("cogvideox-5b", "model"), ("cogvideox-5b", "context")],
)  # fmt: skip
def test_a_backend_chosen_for_a_patched_model_is_used_or_named(
    name: str, form: str, order: str, registered: str
) -> None:
    """Of a model, or of one attention. CogVideoX asks for no backend, patched or not."""
    one = named(name)

    def choose(model: Any) -> None:
        if form == "model":
            model.set_attention_backend(registered)
        elif form != "context":
            getattr(model.blocks[0], form).set_attention_backend(registered)

    for attention in ("int8", "exact"):
        model, inputs = one.make(), one.inputs()
        if order == "chosen first":
            choose(model)
        report = patch_model(model, attention=attention, guard=False)
        choose(model)
        with mock.patch.object(ours, "sageattn", mock.Mock(side_effect=ours.sageattn)) as used:
            if form != "context":
                run(model, inputs)
            else:
                with attention_backend(registered):
                    run(model, inputs)
        said = f"the attention backend {registered!r} is chosen and not used" in str(report)
        assert bool(used.call_count) is (attention == "exact" and name != "cogvideox-5b")
        assert said is (attention == "int8" and name != "cogvideox-5b")
        if form == "context":  # the other form changes the process's default, too
            run(model, inputs)
            assert "is chosen" not in str(report)


# --- two ranks ---------------------------------------------------------------------------------


def parallel_forward(rank: int, degrees: dict[str, int]) -> None:
    """Also refused is what the ranks cannot share."""
    register_backend()
    one = named("t2v")
    model, inputs = one.make(), one.inputs()
    exact = run(model, inputs)
    model.set_attention_backend(NAME)
    enable_parallelism(model, **degrees)
    torch.testing.assert_close(run(model, inputs), exact, rtol=1e-3, atol=1e-4)
    with mock.patch("turbo_rcm_patch.ops.sageattn.INT8_MIN_KEYS", 1):
        error = relative_l2(run(model, inputs), exact)
    assert 1e-5 < error < 2e-2

    class Parallel:
        context_parallel_config = ContextParallelConfig(**degrees)

    q = torch.randn(1, 8, 2, 32, requires_grad=True)
    with pytest.raises(errors.MaskError, match="causal"):
        dispatch_attention_fn(q, q, q, is_causal=True, backend=NAME, parallel_config=Parallel())
    if "ring_degree" in degrees:
        with pytest.raises(errors.MaskError, match="ring"):
            dispatch_attention_fn(
                q, q, q, attn_mask=torch.ones(8, 16).bool(), backend=NAME,
                parallel_config=Parallel(),
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("degree", ["ulysses_degree", "ring_degree"])
def test_context_parallelism_on_two_ranks(degree: str) -> None:
    on_ranks(2, parallel_forward, {degree: 2})
