"""Wan's own VAE and text encoder files, in place of diffusers' and transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from transformers import UMT5Config, UMT5EncoderModel

from tests.turbodiffusion.wan_model import save as save_wan
from tests.video import micro
from tests.video.turbowan import EXACT, PROMPT, SMALL, TEXT, main_of
from turbo_rcm_patch.errors import CheckpointError
from turbo_rcm_patch.turbodiffusion.original import read_vae
from turbowan import sampling
from turbowan.models import load_text_encoder, load_vae

VAES: dict[str, dict[str, Any]] = {
    "published structure": {"base_dim": 8, "z_dim": 16},
    "micro": dict(
        base_dim=4, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1,
        temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ),
    "another decoder": {"base_dim": 8, "z_dim": 16, "decoder_base_dim": 4},
    "other stages": dict(
        base_dim=4, z_dim=16, dim_mult=[1, 3, 2, 4], num_res_blocks=3,
        temperal_downsample=[True, False, True],
    ),
}  # fmt: skip


def original_vae(vae: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    """A VAE's weights by their authors' names, from the order in which their lists are built."""
    state = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    pairs = [("quant_conv", "conv1"), ("post_quant_conv", "conv2")]
    for half, blocks in (("encoder", "downsamples"), ("decoder", "upsamples")):
        module = getattr(vae, half)
        pairs += [(f"{half}.conv_in", f"{half}.conv1"), (f"{half}.conv_out", f"{half}.head.2")]
        pairs += [(f"{half}.norm_out", f"{half}.head.0")]
        for ours, index in (("resnets.0", 0), ("attentions.0", 1), ("resnets.1", 2)):
            pairs.append((f"{half}.mid_block.{ours}", f"{half}.middle.{index}"))
        if half == "encoder":
            inside = [f"down_blocks.{i}" for i in range(len(module.down_blocks))]
        else:
            inside = []
            for i, block in enumerate(module.up_blocks):
                inside += [f"up_blocks.{i}.resnets.{j}" for j in range(len(block.resnets))]
                inside += [f"up_blocks.{i}.upsamplers.0"] * (block.upsamplers is not None)
        pairs += [(f"{half}.{ours}", f"{half}.{blocks}.{i}") for i, ours in enumerate(inside)]
    within = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3",
              "conv2": "residual.6", "conv_shortcut": "shortcut"}  # fmt: skip
    result = {}
    for name, tensor in state.items():
        ours, theirs = max(
            (p for p in pairs if name.startswith(f"{p[0]}.")), key=lambda p: len(p[0])
        )
        module, _, rest = name.removeprefix(f"{ours}.").partition(".")
        result[".".join(filter(None, (theirs, within.get(module, module), rest)))] = tensor
    return result


@pytest.mark.parametrize("name", VAES)
def test_a_vae_is_the_same_network(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**VAES[name]).eval()
    original = original_vae(vae)
    torch.save(original, tmp_path / "vae.pth")
    pipe = micro.micro_pipe()
    base = micro.save(pipe, tmp_path / "base")
    loaded = load_vae(tmp_path / "vae.pth", dtype=torch.float32, base=base)
    assert shown(loaded) == shown(vae)
    video = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    with torch.no_grad():
        latent = vae.encode(video).latent_dist.mode()
        assert torch.equal(loaded.encode(video).latent_dist.mode(), latent)
        assert torch.equal(loaded.decode(latent).sample, vae.decode(latent).sample)


def shown(vae: AutoencoderKLWan) -> dict[str, Any]:
    return {name: value for name, value in vae.config.items() if not name.startswith("_")}


def test_diffusers_own_names_are_met(tmp_path: Path) -> None:
    """Its converter knows the published structure."""
    original = original_vae(AutoencoderKLWan(base_dim=8, z_dim=16))
    torch.save(original, tmp_path / "vae.pth")
    expected = convert_wan_vae_to_diffusers(dict(original))
    found = read_vae(tmp_path / "vae.pth").tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def original_t5(encoder: UMT5EncoderModel) -> dict[str, torch.Tensor]:
    names = {
        "layer.0.layer_norm": "norm1", "layer.1.layer_norm": "norm2",
        "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
        "layer.1.DenseReluDense.wi_0": "ffn.gate.0", "layer.1.DenseReluDense.wi_1": "ffn.fc1",
        "layer.1.DenseReluDense.wo": "ffn.fc2",
    }  # fmt: skip
    names |= {f"layer.0.SelfAttention.{x}": f"attn.{x}" for x in "qkvo"}
    state = encoder.state_dict()
    result = {
        "token_embedding.weight": state["shared.weight"].clone(),
        "norm.weight": state["encoder.final_layer_norm.weight"].clone(),
    }
    for index in range(len(encoder.encoder.block)):
        for ours, theirs in names.items():
            tensor = state[f"encoder.block.{index}.{ours}.weight"]
            result[f"blocks.{index}.{theirs}.weight"] = tensor.clone()
    return result


def text_encoder() -> UMT5EncoderModel:
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=18, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=6,
        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", dropout_rate=0.0,
    )  # fmt: skip
    encoder = UMT5EncoderModel(config).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoder


def test_a_text_encoder_is_the_same_network(tmp_path: Path) -> None:
    encoder = text_encoder()
    torch.save(original_t5(encoder), tmp_path / "t5.pth")
    loaded = load_text_encoder(tmp_path / "t5.pth", dtype=torch.float32)
    ids = torch.randint(0, 18, (2, 40))
    mask = (torch.arange(40) < torch.tensor([[40], [23]])).long()
    with torch.no_grad():
        expected = encoder(ids, attention_mask=mask).last_hidden_state
        assert torch.equal(loaded(ids, attention_mask=mask).last_hidden_state, expected)
    assert load_text_encoder(tmp_path / "t5.pth", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_other_files_are_refused(tmp_path: Path) -> None:
    vae, t5 = original_vae(AutoencoderKLWan(**VAES["micro"])), original_t5(text_encoder())
    path = tmp_path / "in.pth"
    for state, load, text in (
        (t5, load_vae, r"a network with decoder\.conv1\.weight"),
        (vae, load_text_encoder, r"a network with token_embedding\.weight"),
        (vae | {"encoder.extra.0.weight": torch.ones(1)}, load_vae, r"encoder\.extra\.0\.weight"),
        ({k: v for k, v in vae.items() if k != "conv2.bias"}, load_vae, "4 channels"),
        (t5 | {"blocks.9.cross.q.weight": torch.ones(1)}, load_text_encoder, "cross"),
        ({k: v for k, v in t5.items() if "blocks.1.norm1" not in k}, load_text_encoder,
         r"missing: encoder\.block\.1\.layer\.0\.layer_norm\.weight"),
        ({k: v for k, v in t5.items() if "pos_embedding" not in k}, load_text_encoder, "umT5"),
    ):  # fmt: skip
        torch.save(state, path)
        with pytest.raises(CheckpointError, match=text):
            load(path, dtype=torch.float32)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not a torch checkpoint"):
        load_vae(path, dtype=torch.float32)


def test_the_example_runs_with_their_files(tmp_path: Path, monkeypatch) -> None:
    """The same video as with a base that has the same weights; only its tokenizer is used."""
    pipe = micro.micro_pipe()
    base = micro.save(pipe, tmp_path / "base")
    torch.save(original_vae(pipe.vae), tmp_path / "vae.pth")
    torch.save(original_t5(pipe.text_encoder), tmp_path / "t5.pth")
    save_wan(TEXT, tmp_path / "in.pth")
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(sampling, "write_video", lambda videos, path: seen.append(videos))
    given = ["--dit_path", str(tmp_path / "in.pth"), "--base", str(base), "--prompt", PROMPT]
    given += ["--save_path", str(tmp_path / "v.mp4"), "--num_steps", "1", *SMALL, *EXACT]
    main = main_of("turbowan_t2v.py")
    assert main(given) == 0
    for part in ("vae", "text_encoder"):
        for file in (base / part).glob("*.safetensors"):
            file.unlink()
    files = ["--vae_path", str(tmp_path / "vae.pth")]
    files += ["--text_encoder_path", str(tmp_path / "t5.pth")]
    assert main([*given, *files]) == 0
    assert torch.equal(*seen)
