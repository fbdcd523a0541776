"""Blocks that somebody quantised; each test runs where its package is installed. A quantised
Linear is called, and only the skip after it is fused, whichever came first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching.wan import relative, run, wan
from turbo_rcm_patch import PatchConfig, find_pairs, patch_model, unpatch_model


def torchao(config: str) -> Callable[[Any], None]:
    def quantise(model: Any) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model.blocks, getattr(quantization, config)())

    return quantise


def quanto(model: Any) -> None:
    package = pytest.importorskip("optimum.quanto")
    package.quantize(model.blocks, weights=package.qint8)
    package.freeze(model.blocks)


def bitsandbytes(kind: str, **options: Any) -> Callable[[Any], None]:
    def quantise(model: Any) -> None:
        package = pytest.importorskip("bitsandbytes")

        def made(linear: nn.Linear) -> nn.Module:
            own = getattr(package.nn, kind)(linear.in_features, linear.out_features, **options)
            own.load_state_dict(linear.state_dict())
            return own.to("cpu")

        replace(model, made)

    return quantise


def gguf(model: Any) -> None:
    package = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = package.GGMLQuantizationType.Q8_0

    def made(linear: nn.Linear) -> nn.Module:
        own = GGUFLinear(linear.in_features, linear.out_features, compute_dtype=torch.float32)
        data = package.quants.quantize(linear.weight.detach().numpy(), kind)
        own.weight = GGUFParameter(torch.from_numpy(data), quant_type=kind)
        own.bias = linear.bias
        return own

    replace(model, made)


def replace(model: Any, made: Callable[[nn.Linear], nn.Module]) -> None:
    for name, module in list(model.blocks.named_modules()):
        if type(module) is nn.Linear:
            model.blocks.set_submodule(name, made(module))


QUANTISERS: dict[str, Callable[[Any], None]] = {
    "torchao-int8-weights": torchao("Int8WeightOnlyConfig"),
    "torchao-int8-dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-fp8-weights": torchao("Float8WeightOnlyConfig"),
    "quanto-int8": quanto,
    "bitsandbytes-8bit": bitsandbytes("Linear8bitLt", has_fp16_weights=False),
    "bitsandbytes-4bit": bitsandbytes("Linear4bit", compute_dtype=torch.float32),
    "gguf-q8": gguf,
}


@pytest.mark.filterwarnings("ignore")  # Their own.
@pytest.mark.parametrize("patch_first", [True, False], ids=["patch-first", "patch-after"])
@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("name", QUANTISERS)
def test_quantised_linears_are_called(name: str, linear: Any, patch_first: bool) -> None:
    model = wan()
    without = run(model)
    QUANTISERS[name](model)
    expected = run(model)
    assert relative(expected, without) > 1e-3
    config = PatchConfig(attention="exact", linear=linear)
    if patch_first:
        model = wan()
        patch_model(model, config)
        run(model)
        QUANTISERS[name](model)
    else:
        patch_model(model, config)
    assert relative(run(model), expected) < 1e-5
    pair = find_pairs(model)[0]
    assert pair.runs == "after-linear" and "to_out[0] is called" in pair.reason
    assert not pair.int8_linears
    unpatch_model(model)
    assert torch.equal(run(model), expected)
