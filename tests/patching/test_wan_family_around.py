"""What diffusers, accelerate and peft do around the blocks of the rest of the Wan family, before
and after patching. The comparison is with the same feature on an unpatched model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig

from tests.patching.test_around import both_orders, faster, first_block, loop, pyramid
from tests.patching.wan import EXACT, relative, run
from tests.patching.wan_family import classes, named
from turbo_rcm_patch import patch_model, unpatch_model

CPU = torch.device("cpu")
NAMES = ("vace", "animate", "chronoedit", "skyreels-masked")
CLASSES = classes(map(named, NAMES))


def lora(model: Any, _: Path) -> None:
    torch.manual_seed(7)
    targets = [
        "to_q",
        "to_out.0",
        "ffn.net.2",
        *(["proj_in"] if hasattr(model, "vace_blocks") else []),
    ]
    model.add_adapter(
        LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    )
    model.eval()


def casting(model: Any, _: Path) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def grouped(model: Any, folder: Path, kind: str = "block_level") -> None:
    apply_group_offloading(
        model,
        onload_device=CPU,
        offload_device=CPU,
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
        offload_to_disk_path=str(folder),
    )


def grouped_by_leaf(model: Any, folder: Path) -> None:
    grouped(model, folder, "leaf_level")


def sequential(model: Any, _: Path) -> None:
    accelerate.cpu_offload(model, execution_device=CPU)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
@pytest.mark.parametrize("feature", [lora, casting, grouped, grouped_by_leaf, sequential])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.supports(CLASSES, "LoRA", "offloading, casting")
def test_features_around_a_block(
    name: str, feature: Callable[[Any, Path], None], patch_first: bool, tmp_path: Path
) -> None:
    family = named(name)
    inputs = family.inputs()
    reference = family.model()
    feature(reference, tmp_path / "reference")
    expected = run(reference, **inputs)
    model = family.model()
    if patch_first:
        report = patch_model(model, EXACT)
        feature(model, tmp_path / "model")
    else:
        feature(model, tmp_path / "model")
        report = patch_model(model, EXACT)
    for _ in range(2):
        assert relative(run(model, **inputs), expected) < 1e-5
    assert report.fused == family.fused
    unpatch_model(model)
    assert relative(run(model, **inputs), expected) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.supports(CLASSES, "training")
def test_gradient_checkpointing(name: str) -> None:
    family = named(name)

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = family.model()
        model.train().requires_grad_(True)
        if checkpointing:
            model.enable_gradient_checkpointing()
            patch_model(model, EXACT)
        model(**family.inputs())[0].square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, found = gradients(False), gradients(True)
    assert found.keys() == expected.keys()
    assert max(relative(found[n], expected[n]) for n in expected) < 1e-4


@pytest.mark.supports(classes([named("vace")]), "FirstBlockCache")
@pytest.mark.supports(CLASSES, "PAB, FasterCache")
@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
@pytest.mark.parametrize(
    ("name", "cache"),
    # Of these blocks diffusers knows only VACE's well enough for its FirstBlockCache.
    [("vace", first_block), *((name, cache) for name in NAMES for cache in (pyramid, faster))],
)
def test_caches(name: str, cache: Callable[[Any], None], patch_first: bool) -> None:
    family = named(name)
    model = family.model()
    without = loop(model, family.inputs())
    cache(model)
    expected = loop(model, family.inputs())
    assert relative(expected, without) > 1e-4, "the cache must have an effect"
    model = family.model()
    both_orders(model, cache, patch_first)
    assert relative(loop(model, family.inputs()), expected) < 1e-5
    model._reset_stateful_cache()
    unpatch_model(model)
    assert torch.equal(loop(model, family.inputs()), expected)
    model.disable_cache()
    assert torch.equal(loop(model, family.inputs()), without)
