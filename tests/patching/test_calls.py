"""A patched block is called and exported as its author's is."""

from __future__ import annotations

import copy
import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.measures import relative_l2
from tests.patching.models import MODELS, mapped, named, run
from tests.patching.test_changes import TIGHT
from tests.patching.vae import VAES, decode
from turbo_rcm_patch import patch_model, patched
from turbo_rcm_patch.patching import block as blocks
from turbo_rcm_patch.patching import sla_as_defined


def called_with(block: nn.Module, model: nn.Module, inputs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments with which a model calls a block, by position and by name."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(
        lambda module, args, named: seen.append((args, named)), with_kwargs=True
    )
    run(model, inputs)
    hook.remove()
    return seen[0]


def blocks_of(model: Any) -> list[Any]:
    """One block of each kind."""
    names = ("blocks", "vace_blocks", "transformer_blocks")
    held = [getattr(model, name)[0] for name in names if hasattr(model, name)] or [model]
    return [getattr(one, "_checkpoint_wrapped_module", one) for one in held]


def tensors(made: Any) -> list[torch.Tensor]:
    return [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the calls return whose kernels are compiled ahead."""
    results: list[Any] = []
    monkeypatch.setattr(blocks, "compile_kernels", lambda _impl, _on, call: results.append(call()))
    return results


def counted(model: Any) -> Any:
    """A model whose first block has a hook that counts its calls."""
    model.blocks[0].attn1.to_q.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("change", "options", "count"),
    [(lambda model: model, {}, 1), (lambda model: model, {"guard": False}, 1),
     (lambda model: model, {"linear": "int8"}, 0), (counted, {}, 0)],
    ids=["plain", "no-guard", "int8-copies", "foreign"],
)  # fmt: skip
def test_kernels_are_compiled_ahead_once_where_nothing_keeps_what_modules_compute(
    change: Any, options: dict[str, Any], count: int, ahead: list[Any]
) -> None:
    model, inputs = change(named("t2v").model()), named("t2v").inputs()
    patch_model(model, attention="int8", **options)
    made = [run(model, inputs) for _ in range(2)]
    assert len(ahead) == count and torch.equal(*made)


@pytest.mark.parametrize("vae", VAES, ids=lambda vae: vae.name)
def test_kernels_of_a_vae_are_compiled_ahead_once_over_its_first_frames(
    vae: Any, ahead: list[Any]
) -> None:
    model = vae.model()
    patch_model(model)
    with torch.no_grad():
        made = [decode(model, vae.latent(5)) for _ in range(2)]
    assert ahead == [None] and torch.equal(*made)


@pytest.mark.filterwarnings("ignore:cross_attention_kwargs")
def test_arguments_of_an_attention_are_the_authors() -> None:
    one = named("cogvideox-5b")
    model, inputs = one.model(), one.inputs() | {"attention_kwargs": {"gain": 3.0}}
    expected = run(model, inputs)
    report = patch_model(model, attention="exact", guard=False)
    assert torch.equal(run(model, inputs), expected)
    assert all("attention_kwargs" in words for words in report.ran().values())


@pytest.mark.parametrize("by", ["position", "name"])
@pytest.mark.parametrize("one", [one for one in MODELS if "sla" not in one.name], ids=str)
def test_a_block_takes_its_authors_arguments(one: Any, by: str) -> None:
    model, inputs = one.model(), one.inputs()
    for block in blocks_of(model):
        args, more = called_with(block, model, inputs)
        names = inspect.signature(type(block).forward).bind(block, *args, **more)
        names.apply_defaults()
        given = {name: value for name, value in names.arguments.items() if name != "self"}

        def call(block: Any = block, given: Any = given) -> list[torch.Tensor]:
            with torch.no_grad():
                return tensors(block(**given) if by == "name" else block(*given.values()))

        expected = call()
        with patched(model, attention="exact", guard=False) as report:
            made = call()
            assert any(words.startswith("fused") for words in report.ran().values())
        for ours, theirs in zip(made, expected, strict=True):
            assert relative_l2(ours, theirs) <= TIGHT


@pytest.mark.parametrize(
    ("name", "strict", "linear"),
    [*((name, True, "int8") for name in ("t2v", "i2v", "vace", "anyflow", "sla", "cogvideox-5b")),
     *((name, False, "as-is") for name in ("t2v", "skyreels", "consisid"))],
)  # fmt: skip
def test_an_exported_block_is_its_authors(name: str, strict: bool, linear: Any) -> None:
    model, inputs = named(name).model(), named(name).inputs()
    block = blocks_of(model)[-1]
    args, more = called_with(block, model, inputs)
    with torch.no_grad():
        with sla_as_defined(model, 0.1):
            expected = tensors(block(*args, **more))
        patch_model(model, linear=linear)
        torch._dynamo.reset()
        made = torch.export.export(block, args, more, strict=strict).module()(*args, **more)
    assert all(map(torch.equal, tensors(made), expected))


@pytest.mark.parametrize(
    ("name", "default", "linear"),
    [*product(["t2v"], [torch.float64, torch.bfloat16, torch.float16, "meta"], ["as-is", "int8"]),
     *product(["sla", "skyreels", "cogvideox-5b", "rcm-projection"], [torch.bfloat16, "meta"],
              ["int8"])],
)  # fmt: skip
def test_the_default_dtype_and_device_change_nothing(name: str, default: Any, linear: Any) -> None:
    one = named(name)
    inputs = one.inputs(dtype=torch.bfloat16)
    made = []
    for changed in (False, True):
        model = one.model(torch.bfloat16)
        report = patch_model(model, attention="int8", linear=linear)
        try:
            if changed and default == "meta":
                torch.set_default_device(default)
            elif changed:
                torch.set_default_dtype(default)
            made.append((run(model, inputs), list(report.guard), report.guard.prediction))
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    (expected, *guarded), (same, *with_other) = made
    assert torch.equal(same, expected)
    assert guarded == with_other


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("name", ["t2v", "skyreels", "vace", "cogvideox-5b", "rcm-projection"])
def test_a_forward_on_the_meta_device_is_the_authors(name: str, linear: Any) -> None:
    model = named(name).model().to("meta")
    inputs = mapped(named(name).inputs(), lambda x: x.to("meta"))
    expected = run(model, inputs)
    report = patch_model(model, linear=linear)
    assert run(model, inputs).shape == expected.shape
    assert all("meta device" in words for words in report.ran().values())


def along(x: Tensor, axis: int) -> dict[str, Tensor]:
    """Other lengths of an axis."""
    empty, whole = x.narrow(axis, 0, 0), range(x.shape[axis])
    made = {"none": empty, "twice": torch.cat([x, x], axis)}
    return made | {f"{n} of": x.narrow(axis, 0, n) for n in (1, x.shape[axis] - 1) if n in whole}


def misfits(x: Tensor) -> dict[str, Tensor]:
    """A tensor of other lengths and in other dtypes."""
    made = {
        f"{name} axis {axis}": other
        for axis in range(x.dim())
        if x.shape[axis] != 6  # of modulations
        for name, other in along(x, axis).items()
    }
    if x.is_floating_point():
        made |= {str(dtype): x.to(dtype) for dtype in (torch.bfloat16, torch.half, torch.double)}
        made["meta"] = x.to("meta")
    return made


def sixes(x: Any, tokens: int) -> Any:
    """Six tokens of video and of text."""
    for axis in range(x.dim() if isinstance(x, Tensor) else 0):
        x = x.narrow(axis, 0, 6) if x.shape[axis] in (tokens, 7) else x
    return x


def outcome(block: nn.Module, given: Any) -> list[Tensor] | str:
    try:
        with torch.no_grad():
            return tensors(block(*given[0], **given[1]))
    except Exception as error:
        return f"{type(error)} {error}"


CALLS = ["t2v", "i2v", "gate-per-token", "vace", "skyreels-forcing", "skyreels-masked", "anyflow",
         "anyflow-far", "cogvideox-2b", "cogvideox-5b", "consisid", "turbo", "turbo-i2v", "rcm",
         "rcm-projection"]  # fmt: skip
SIX = ("t2v", "i2v", "gate-per-token", "vace", "anyflow", "cogvideox-5b", "turbo", "rcm")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    ("name", "six"), [*((name, False) for name in CALLS), *((name, True) for name in SIX)]
)
def test_a_call_that_does_not_fit_is_the_authors(name: str, six: bool) -> None:
    """Each tensor in turn of other lengths and dtypes. What the author computes is what comes, and
    what he refuses is refused. `six`: batch, tokens and text are as many as modulations."""
    model = named(name).model()
    for block in blocks_of(model):
        given = called_with(block, model, named(name).inputs(6 if six else 2))
        leaves, form = tree_flatten(given)
        if six:
            cut = {id(x): sixes(x, leaves[0].shape[1]) for x in leaves}
            leaves = [cut[id(x)] for x in leaves]  # equal ones stay one tensor
        theirs = copy.deepcopy(block)
        with patched(model, attention="exact", guard=False) as report:
            for index, leaf in enumerate(leaves):
                others = misfits(leaf) if isinstance(leaf, Tensor) else {}
                for words, other in ({"nothing": leaf} | others).items():
                    call = tree_unflatten([*leaves[:index], other, *leaves[index + 1 :]], form)
                    block.forward.__self__.last = None
                    expected, made = outcome(theirs, call), outcome(block, call)
                    fused = any(ran.startswith("fused") for ran in report.ran().values())
                    where = f"{words} of argument {index}: {expected} {made}"
                    if isinstance(expected, str):
                        assert made == expected or (isinstance(made, str) and not fused), where
                    elif fused or words != "meta":
                        assert not isinstance(made, str), where
                        for one, two in zip(made, expected, strict=True):
                            assert (one.shape, one.dtype) == (two.shape, two.dtype), where
                            assert not one.numel() or relative_l2(one, two) <= TIGHT, where
                    assert words != "nothing" or (fused and not isinstance(made, str)), where


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["t2v", "anyflow", "cogvideox-5b", "consisid", "turbo"])
def test_tables_that_are_kept_follow_all_that_they_are_made_of(name: str, mode: Any) -> None:
    """Text of another length, tables written in place, other tables, and what they were again."""
    model = named(name).model()
    (block,) = blocks_of(model)
    leaves, form = tree_flatten(called_with(block, model, named(name).inputs()))
    theirs, tokens = copy.deepcopy(block), leaves[0].shape[1]
    with mode(), patched(model, attention="exact", guard=False) as report:
        shapes = [tuple(getattr(x, "shape", ())) for x in leaves]
        table = [i for i, shape in enumerate(shapes) if i and tokens in shape]
        text = next(i for i, shape in enumerate(shapes) if shape[1:2] == (7,))
        cut = leaves[:text] + [leaves[text][:, :5]] + leaves[text + 1 :]
        kept = {id(leaves[i]): leaves[i].clone() for i in table}
        others = [kept.get(id(x), x) for x in leaves]
        steps = [leaves, cut, leaves, "write", leaves, others, "write", others, leaves, cut]
        for step in steps:
            if step == "write":
                for x in [*kept.values(), *{id(leaves[i]): leaves[i] for i in table}.values()]:
                    x.mul_(-0.5)
                continue
            args, more = tree_unflatten(step, form)
            before = [x.clone() if isinstance(x, Tensor) else x for x in step]
            made, expected = tensors(block(*args, **more)), tensors(theirs(*args, **more))
            assert report.ran() and all("fused" in words for words in report.ran().values())
            for ours, other in zip(made, expected, strict=True):
                assert relative_l2(ours, other) <= TIGHT
            for one, two in zip(step, before, strict=True):  # Nothing that was given is written.
                assert torch.equal(one, two) if isinstance(one, Tensor) else one == two
