"""LoRAs beside the weights: into one or two experts, with int8 bases, and what goes wrong."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from tests.video.micro import SMALL, TRANSFORMER, micro_pipe, save
from turbo_rcm_patch import extras, find_pairs
from turbo_rcm_patch.errors import ConfigError, MissingPackageError, ModelFolderError
from turbo_rcm_patch.video.generation import settings_for
from turbo_rcm_patch.video.load import load_pipeline, load_skeleton
from turbo_rcm_patch.video.lora import LoRA, add_loras, loras_of, parse_lora

PROMPT = "a red circle moves left"
LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
#: How large a LoRA's update is, against the weight.
SIZE = 0.25


def write_lora(path: Path, network: Any, seed: int = 0) -> Path:
    """A LoRA of every Linear of the blocks, in the form that diffusers saves."""
    path.parent.mkdir(exist_ok=True)
    network.add_adapter(LoraConfig(r=4, lora_alpha=2, target_modules=LINEARS), "made")
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if "made" in getattr(module, "lora_A", {}):
            a, b = module.lora_A["made"].weight.data, module.lora_B["made"].weight.data
            a.normal_(generator=generator)
            b.normal_(generator=generator)
            b *= 2 * SIZE * float(module.base_layer.weight.data.norm() / (b @ a).norm())
    WanPipeline.save_lora_weights(
        path.parent,
        transformer_lora_layers=get_peft_model_state_dict(network, adapter_name="made"),
        weight_name=path.name,
        transformer_lora_adapter_metadata=network.peft_config["made"].to_dict(),
    )
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines, and a LoRA for each expert."""
    place = tmp_path_factory.mktemp("lora")
    save(micro_pipe(), place / "one")
    save(micro_pipe(experts=True), place / "two")
    pipe = micro_pipe(experts=True)
    write_lora(place / "a_high_noise.safetensors", pipe.transformer, 1)
    write_lora(place / "a_low_noise.safetensors", pipe.transformer_2, 2)
    shutil.copy(place / "a_low_noise.safetensors", place / "other.safetensors")
    return place


def scales(network: Any) -> list[float]:
    """The scales of the active LoRAs of a transformer's first Linear."""
    linear = network.blocks[0].attn1.to_q
    names = getattr(linear, "active_adapters", ())
    return [linear.scaling[one] * linear.r[one] / linear.lora_alpha[one] for one in names]


def test_each_expert_gets_its_own(files: Path) -> None:
    high, low = files / "a_high_noise.safetensors", files / "a_low_noise.safetensors"
    other = files / "other.safetensors"
    pipe = load_pipeline(files / "two", device="cpu", lora=[f"{high}:0.5", f"{low}"])
    assert (scales(pipe.transformer), scales(pipe.transformer_2)) == ([0.5], [1.0])
    assert pipe.transformer.blocks[0].scale_shift_table.dtype == torch.float32, "kept in fp32"
    several = [f"{high}:0.5", f"{other}:-2", f"transformer_2={other}:3"]
    pipe = load_pipeline(files / "two", device="cpu", lora=several)
    assert scales(pipe.transformer) == [0.5, -2.0]
    assert scales(pipe.transformer_2) == [-2.0, 3.0]
    one = load_pipeline(files / "one", device="cpu", lora=[str(high)])
    assert scales(one.transformer) == [1.0]


def test_a_lora_does_what_its_formula_says(files: Path) -> None:
    pipe = load_pipeline(files / "one", dtype=torch.float32, device="cpu")
    linear, x = pipe.transformer.blocks[1].ffn.net[2], torch.randn(3, 128)
    before = linear(x)
    add_loras(pipe, [f"{files / 'other.safetensors'}:0.5"])
    with torch.no_grad():
        wrapped = pipe.transformer.blocks[1].ffn.net[2]
        (name,) = wrapped.active_adapters
        update = wrapped.lora_B[name].weight @ wrapped.lora_A[name].weight
        torch.testing.assert_close(wrapped(x), before + 0.5 * 2 / 4 * x @ update.T)


def test_a_run_is_identified_by_its_loras(files: Path) -> None:
    """By scale and weights, whoever loaded them and under whatever name."""
    high, low = files / "a_high_noise.safetensors", files / "other.safetensors"

    def recorded(*given: str) -> object:
        pipe = load_pipeline(files / "one", device="cpu", lora=given)
        return settings_for(pipe, sampler="lightning", **SMALL).as_dict()["lora"]

    assert recorded() == ()
    made = [recorded(str(high)), recorded(f"{high}:0.5"), recorded(str(low)), recorded()]
    assert len({*made}) == 4
    pipe = load_pipeline(files / "one", device="cpu")
    pipe.load_lora_weights(str(files), weight_name=high.name, adapter_name="mine")
    assert settings_for(pipe, **SMALL).lora == made[0] == loras_of(pipe)


def test_pairs_take_loras_without_weights(files: Path) -> None:
    plain = load_skeleton(files / "two")
    pipe = load_skeleton(files / "two", lora=[str(files / "a_high_noise.safetensors")])
    assert scales(pipe.transformer) == [1.0] and scales(pipe.transformer_2) == []
    assert len(find_pairs(pipe)) == len(find_pairs(plain))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", ("a/b", 1.0, ("transformer", "transformer_2"))),
        ("a/b:0.8", ("a/b", 0.8, ("transformer", "transformer_2"))),
        ("a/b/low-noise.safetensors", ("a/b/low-noise.safetensors", 1.0, ("transformer_2",))),
        ("a/b/V1/HIGH_noise_model.safetensors:2",
         ("a/b/V1/HIGH_noise_model.safetensors", 2.0, ("transformer",))),
        ("transformer_2=a/b/high_noise.safetensors",
         ("a/b/high_noise.safetensors", 1.0, ("transformer_2",))),
    ],
)  # fmt: skip
def test_names_of_the_hub(text: str, expected: tuple[object, ...]) -> None:
    source, scale, parts = expected
    assert parse_lora(text) == LoRA(text, source, scale, parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("{}/none.safetensors", ModelFolderError, "no such LoRA: .*none.safetensors"),
        ("{}/a_high_noise.safetensors:abc", ConfigError, "scale of the LoRA .*got abc"),
        ("{}/a_high_noise.safetensors:nan", ConfigError, "finite number"),
        ("{}/a_low_noise.safetensors", ConfigError, "Write transformer=FILE"),
        ("transformer_2={}/other.safetensors", ConfigError, "which a WanPipeline has"),
        ("{}/one/vae/diffusion_pytorch_model.safetensors", ModelFolderError, "Invalid LoRA"),
        ("{}/alpha/alpha.safetensors", ModelFolderError, "alpha is negative"),
        ("{}", ModelFolderError, "it has 3 .safetensors files; name one"),
        ("{}/wide/wide.safetensors", ModelFolderError, "size mismatch|Error"),
        ("", ConfigError, "PATH_OR_ID"),
    ],
)
def test_what_goes_wrong_is_said(given, error, text, files) -> None:
    if "wide" in given:
        wide = WanTransformer3DModel(**TRANSFORMER | {"num_attention_heads": 4})
        write_lora(files / "wide" / "wide.safetensors", wide)
    if "alpha" in given:
        (files / "alpha").mkdir()
        weights = {"diffusion_model.blocks.0.self_attn.q.alpha": torch.tensor(-4.0)}
        save_file(weights, files / "alpha" / "alpha.safetensors")
    pipe = load_pipeline(files / "one", device="cpu")
    with pytest.raises(error, match=text):
        add_loras(pipe, [str(files / "a_high_noise.safetensors"), given.format(files)])


#: Keys of a LoRA in the form of Wan's authors, and whether they change a diffusers model.
OF_LIGHTX2V = {
    "blocks.0.self_attn.q.lora_down.weight": (4, 128, True),
    "blocks.0.self_attn.q.lora_up.weight": (128, 4, True),
    "blocks.0.self_attn.q.diff_b": (128, True),
    "blocks.0.self_attn.q.alpha": (True,),
    "blocks.0.self_attn.norm_q.diff": (128, False),
    "blocks.0.norm3.diff": (128, False),
    "blocks.0.norm3.diff_b": (128, False),
    "blocks.0.modulation.diff_m": (1, 6, 128, False),
    "blocks.1.ffn.0.lora_down.weight": (4, 128, True),
    "blocks.1.ffn.0.lora_up.weight": (128, 4, True),
    "patch_embedding.diff": (128, 4, 1, 1, 1, False),
}


@pytest.mark.parametrize("zero", [False, True])
def test_weights_that_the_loader_drops_are_named(zero, tmp_path, caplog) -> None:
    """diffusers' converter removes them without a word. Zeros change nothing anywhere."""
    weights = {
        f"diffusion_model.{key}": torch.randn(shape) for key, (*shape, _) in OF_LIGHTX2V.items()
    }
    weights["diffusion_model.blocks.0.self_attn.q.alpha"] = torch.tensor(4.0)
    lost = {f"diffusion_model.{key}" for key, (*_, kept) in OF_LIGHTX2V.items() if not kept}
    if zero:
        weights |= {key: torch.zeros_like(weights[key]) for key in lost}
    save_file(weights, tmp_path / "a.safetensors")
    with caplog.at_level(logging.WARNING):
        add_loras(micro_pipe(), [str(tmp_path)])
    named = {key for key in weights if f"'{key}'" in caplog.text}
    assert named == (set() if zero else lost)
    assert zero or "5 of its 10 weights fit the transformer" in caplog.text


def test_without_peft_its_name_is_said(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "peft" else there(name))
    with pytest.raises(MissingPackageError, match=r"pip install .*\[lora\]"):
        load_pipeline(files / "one", device="cpu", lora=[str(files / "other.safetensors")])
