"""One forward of a published size of every class, random weights, at the size of a real video: the
kernels run, the guard keeps every pair, and the output is near the unpatched one's.

The networks of 14B need some 45 GB of memory, by their weights; it was not measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from tests.measures import relative_l2
from tests.patching.turbodiffusion import tiny
from tools.support import PUBLISHED, Published, count_pairs, short_name
from turbo_rcm_patch import PatchConfig, patched
from turbo_rcm_patch.models import RCMAttention

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: The smallest published model of every class of diffusers: key of the registry -> model.
SMALLEST = {name: models[0] for name, models in PUBLISHED.items() if "diffusers" in name}
CLASSES = tuple(map(short_name, SMALLEST))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def network(name: str, model: Published) -> Any:
    """In bf16, with what diffusers keeps in fp32 in fp32."""
    with torch.device("meta"):
        weights = 2 * sum(p.numel() for p in model.build(name).parameters())
    # Weights, and what a forward of some 30,000 tokens and the guard hold beside them.
    needed = 1.2 * weights + 12e9
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"{needed / 1e9:.0f} GB of memory on the card are not free")
    torch.set_default_dtype(BF16)
    try:
        with torch.device("cuda"):
            made: Any = model.build(name).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    keep = made._keep_in_fp32_modules or ()
    for path, parameter in made.named_parameters():
        if any(part in path for part in keep):
            parameter.data = parameter.data.float()
    return made


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def inputs(cls: str, config: Any) -> dict[str, Any]:
    """81 frames of 480 x 832 for Wan, 49 of 480 x 720 for CogVideoX."""
    given: dict[str, Any] = {"return_dict": False}
    if cls in ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"):
        given["hidden_states"] = noise(1, 13, config.in_channels, 60, 90)
        given["timestep"] = torch.tensor([500], device="cuda")
        given["encoder_hidden_states"] = noise(1, 226, 4096)
        if config.use_rotary_positional_embeddings:
            given["image_rotary_emb"] = get_3d_rotary_pos_embed(
                64, ((0, 0), (30, 45)), (30, 45), 13, device=torch.device("cuda")
            )
        if cls == "ConsisIDTransformer3DModel":
            given["id_cond"] = noise(1, config.LFE_id_dim)
            given["id_vit_hidden"] = [noise(1, 577, config.LFE_vit_dim) for _ in range(5)]
        return given
    given["encoder_hidden_states"] = noise(1, 512, 4096)
    if cls.startswith("AnyFlow"):
        frames = 3 if "FAR" in cls else 21
        given["hidden_states"] = noise(1, frames, config.in_channels, 60, 104)
        given["timestep"] = torch.full((1, frames), 500.0, device="cuda")
        given["r_timestep"] = given["timestep"] / 2
        if "FAR" in cls:  # the third chunk, after one of 1 frame and one of 3
            held = 2, 1, config.num_attention_heads, 4 * 1560, config.attention_head_dim
            empty = noise(*held)[:, :, :, :0]
            given["kv_cache"] = [
                {"full_cache": noise(*held), "compressed_cache": empty}
                for _ in range(config.num_layers)
            ]
            given["kv_cache_flag"] = {"is_cache_step": False, "num_cached_chunks": 2}
            given["chunk_partition"] = [1, 3, 3]
        return given
    given["hidden_states"] = noise(1, config.in_channels, 21, 60, 104)
    given["timestep"] = torch.tensor([500.0], device="cuda")
    if config.get("added_kv_proj_dim"):
        given["encoder_hidden_states_image"] = noise(1, 257, config.image_dim)
    if cls == "WanVACETransformer3DModel":
        given["control_hidden_states"] = noise(1, config.vace_in_channels, 21, 60, 104)
    if cls == "WanAnimateTransformer3DModel":
        given["pose_hidden_states"] = noise(1, config.latent_channels, 20, 60, 104)
        given["face_pixel_values"] = noise(1, 3, 77, 512, 512)
    if config.get("inject_sample_info"):
        given["fps"] = [1]
    return given


@pytest.mark.supports(CLASSES, "full size")
@pytest.mark.parametrize("name", SMALLEST, ids=short_name)
def test_a_published_size(name: str) -> None:
    model = network(name, SMALLEST[name])
    given = inputs(short_name(name), model.config)
    with torch.no_grad():
        expected = model(**given)[0]
        assert expected.isfinite().all()
        with patched(model, PatchConfig(attention="int8")) as report:
            output = model(**given)[0]
            assert report.impl == "triton"
            assert report.fused == count_pairs(name, SMALLEST[name])[0], str(report)
            assert len(report.guard) >= len(report.ran())
    error = relative_l2(output, expected)
    assert 0 < error < 0.05


@pytest.mark.supports("WanModel", "full size")
def test_turbodiffusion_s_1_3b() -> None:
    """The stand-in of the patcher tests, 30 blocks of 12 heads over 32,760 tokens."""
    model = tiny(dim=1536, num_heads=12, layers=30).to("cuda", BF16)
    given = {"x": noise(1, 32760, 16), "context": noise(1, 7, 1536)}
    given["e"] = 0.3 * noise(1, 6, 1536).float()
    with torch.no_grad():
        expected = model(**given)
        with patched(model, PatchConfig(attention="int8")) as report:
            output = model(**given)
            assert report.impl == "triton" and report.fused == 90, str(report)
    assert 0 < relative_l2(output, expected) < 0.05


@pytest.mark.supports("RCMAttention", "Triton kernels")
@pytest.mark.parametrize("projection", [True, False], ids=["projection", "bare"])
def test_a_patched_rcm_module(projection: bool) -> None:
    module = RCMAttention(256, 2, projection=projection).to("cuda", BF16).eval()
    x = noise(2, 1000, 256)
    with torch.no_grad():
        expected = module(x, 0.8)
        with patched(module, attention="int8") as report:
            assert relative_l2(module(x, 0.8), expected) < 0.02
            assert report.impl == "triton" and report.fused == 1
