"""The convolution of video autoencoders and the passes between convolutions, against float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_wan as author

from tests.implementations import over
from turbo_rcm_patch.errors import GradientError
from turbo_rcm_patch.ops.conv3d import passes
from turbo_rcm_patch.ops.conv3d.api import conv3d, pack_phases, pack_weight

#: One rounding of the result, and the sums of fp32.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
FP32 = torch.float32
EVERY = {"dtype": [FP32, torch.bfloat16, torch.float16]}
#: The interpreter truncates to bf16.
SOME = {"dtype": [FP32, torch.float16]}

#: B, T, H, W, C.
SHAPES = [(1, 1, 3, 5, 96), (2, 3, 4, 6, 24), (1, 4, 5, 7, 160)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda one: "x".join(map(str, one)))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False


def close(found: torch.Tensor, truth: torch.Tensor, limit: float | None = None) -> None:
    assert found.shape == truth.shape and found.is_contiguous()
    far = (found.double().cpu() - truth.cpu()).norm() / truth.norm()
    assert far <= (limit or LIMITS[found.dtype]), float(far)


def norms(on: Any, channels: int, dtype: torch.dtype, latent: torch.Tensor) -> dict[str, Any]:
    weight, bias = (on.randn(channels, dtype=dtype) for _ in range(2))
    return {
        "none": None,
        "rms": passes.RMSNorm(weight),
        "rms-bias": passes.RMSNorm(weight, bias),
        "group": passes.GroupNorm(weight, bias, 8, 1e-6),
        "spatial": passes.GroupNorm(weight, bias, 8, 1e-6, latent, latent + 1),
    }


@over(reference=EVERY, interpreter=SOME, gpu=EVERY)
@pytest.mark.parametrize("kind", ["none", "rms", "rms-bias", "group", "spatial"])
@shapes
def test_norm_and_silu_are_written_behind_the_history(
    on: Any, dtype: torch.dtype, kind: str, shape: tuple[int, ...]
) -> None:
    batch, frames, height, width, channels = shape
    x = on.randn(*shape, dtype=dtype) * 3 + 4
    latent = on.randn(batch, min(frames, 2 + frames % 2), height, width, channels, dtype=dtype)
    norm = norms(on, channels, dtype, latent)[kind]
    before = on.randn(channels, dtype=dtype)
    history = on.randn(batch, 2, height, width, channels, dtype=dtype)
    y = x.double() + before.double()
    if kind.startswith("rms"):
        y = F.normalize(y, dim=-1) * channels**0.5 * norm.weight.double()
        y = y if norm.bias is None else y + norm.bias.double()
    elif norm is not None:
        planes = y.movedim(-1, 1)
        y = F.group_norm(planes, 8, norm.weight.double(), norm.bias.double(), 1e-6)
        y = y.movedim(1, -1)
        if kind == "spatial":
            index = passes.frames_of(frames, latent.shape[1], x.device)
            y = y * latent.double()[:, index] + (latent + 1).double()[:, index]
    truth = torch.cat([history.double(), F.silu(y)], 1)
    found, kept = passes.norm_silu(x, norm, before=before, frames=2, history=history, impl=on.impl)
    close(found[:, 2:].contiguous(), truth[:, 2:])
    assert torch.equal(found[:, :2], history)
    assert torch.equal(kept, found[:, -2:])
    empty, _ = passes.norm_silu(x, norm, frames=1, impl=on.impl)
    assert not empty[:, :1].any() and empty.shape[1] == frames + 1


@over(reference=EVERY, interpreter=SOME, gpu=EVERY)
@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 3, 5, 32), (2, 3, 4, 6, 16), (1, 2, 5, 7, 8)], ids=str)
def test_a_convolution_of_an_enlarged_frame_reads_the_small_one(
    on: Any, dtype: torch.dtype, first: bool, times: int, shape: tuple[int, ...]
) -> None:
    """Twice as many equal frames, or Wan 2.2's shortcut from half as many."""
    batch, frames, height, width, channels = shape
    latent, repeat = on.randn(*shape, dtype=dtype), 1 if times else 2
    x, duplicate = latent, None
    if times:
        frames = frames * times - first * (times - 1)
        x = on.randn(batch, frames, height, width, channels, dtype=dtype)
    weight, bias = on.randn(8, channels, 3, 3, dtype=dtype) * 0.1, on.randn(8, dtype=dtype)
    small = x.repeat_interleave(repeat, 1)[:, first * (repeat - 1) :]
    planes = F.interpolate(small.double().flatten(0, 1).movedim(-1, 1), scale_factor=2.0)
    truth = F.conv2d(planes, weight.double(), bias.double(), padding=1).movedim(1, -1)
    truth = truth.unflatten(0, (batch, -1))
    if times:
        shortcut = author.DupUp3D(channels, 8, times, 2)
        wide = shortcut(latent.double().movedim(-1, 1), first_chunk=first)
        truth = truth + wide.movedim(1, -1)
        strided = F.pad(latent, (0, 0, 1, 0))[..., 1:, :]
        duplicate = passes.Duplicate(strided, times, shortcut.repeats)
    y = conv3d(x, pack_phases(pack_weight(weight)), padding=(1, 1), impl=on.impl)
    found = passes.upsample(
        y, bias, duplicate, repeat=repeat, first=first, dtype=dtype, impl=on.impl
    )
    close(found, truth, 2 * LIMITS[dtype])  # of the product, and of its sum with the rest


@over(reference=EVERY, gpu=EVERY)
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("more", ["", "bias", "bias-residual"])
def test_the_convolution_is_torchs(
    on: Any, dtype: torch.dtype, kernel: Any, stride: Any, more: str
) -> None:
    x = on.randn(2, 5, 6, 7, 32, dtype=dtype)
    weight = on.randn(64, 32, *kernel, dtype=dtype) * 0.05
    bias = on.randn(64, dtype=dtype) if more else None
    padding = kernel[1] // 2, kernel[2] // 2
    truth = F.conv3d(
        x.double().movedim(-1, 1), weight.double(), None if bias is None else bias.double(),
        stride, (0, *padding),
    ).movedim(1, -1)  # fmt: skip
    residual = on.randn(*truth.shape) if "residual" in more else None
    truth = truth if residual is None else truth + residual.double()
    wide = torch.float32 if residual is not None else dtype
    y = conv3d(
        x, pack_weight(weight), bias, residual=residual, stride=stride, padding=padding, dtype=wide
    )
    assert y.dtype == wide
    close(y, truth, LIMITS[dtype] if dtype == torch.float32 else 2 * LIMITS[dtype])


@over(reference=EVERY, interpreter=SOME, gpu=EVERY)
@pytest.mark.parametrize("more", ["bias", "residual", "bias-residual"])
@pytest.mark.parametrize("wide", [False, True], ids=["in-place", "to-fp32"])
def test_bias_and_residual_are_added(on: Any, dtype: torch.dtype, more: str, wide: bool) -> None:
    y, residual = on.randn(2, 2, 3, 4, 5, 24, dtype=dtype).unbind(0)
    bias = on.randn(24, dtype=dtype)
    operands = {"before": bias} if "bias" in more else {}
    operands |= {"residual": residual} if "residual" in more else {}
    truth = y.double() + sum(x.double() for x in operands.values())
    options = {"dtype": FP32 if wide else dtype, "in_place": True, "impl": on.impl}
    found, _ = passes.norm_silu(y, None, silu=False, **operands, **options)
    close(found, truth)
    if on.impl == "triton":
        assert (found.data_ptr() == y.data_ptr()) == (not wide or dtype == FP32)


def test_a_gradient_is_refused() -> None:
    x, weight = torch.randn(1, 3, 4, 4, 8), torch.randn(4, 3, 3, 3, 8)
    with pytest.raises(GradientError):
        conv3d(x.requires_grad_(), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", EVERY["dtype"], ids=str)
@pytest.mark.parametrize(
    ("channels", "features", "kernel", "size"),
    [
        (96, 96, (3, 3, 3), (3, 50, 100)),
        (384, 384, (3, 3, 3), (2, 60, 104)),  # rows and positions change places
        (96, 160, (3, 3, 3), (2, 30, 70)),  # a tile of channels is half empty
        (192, 192, (1, 3, 3), (2, 33, 129)),
        (64, 768, (3, 1, 1), (5, 12, 64)),
        (3, 96, (3, 3, 3), (2, 20, 30)),
        (96, 3, (3, 3, 3), (1, 6, 64)),
    ],
    ids=str,
)
def test_the_kernel_of_hopper_pads_covers_and_rounds(
    channels: int, features: int, kernel: Any, size: Any, dtype: torch.dtype
) -> None:
    """fp32 is multiplied in TF32, whose error is that of cuDNN's, and has no bias."""
    torch.backends.cudnn.allow_tf32 = True
    kt, kh, kw = kernel
    frames, height, width = size
    on = {"device": "cuda", "dtype": dtype}
    x = torch.randn(2, frames + kt - 1, height, width, channels, **on)
    weight = torch.randn(features, channels, *kernel, **on) / (channels * kt * kh * kw) ** 0.5
    bias, residual = torch.randn(features, **on), torch.randn(2, *size, features, **on)
    packed, padding = pack_weight(weight), (kh // 2, kw // 2)
    planes = x.double().permute(0, 4, 1, 2, 3)
    branch = F.conv3d(planes, weight.double(), padding=(0, *padding)).permute(0, 2, 3, 4, 1)
    truth = branch + bias.double() + residual.double()
    ran = Counter[str]()
    made = conv3d(x, packed, bias, residual=residual, padding=padding, counts=ran)
    if torch.cuda.get_device_capability() == (9, 0) and not (dtype == FP32 and features == 768):
        assert ran == {"hopper": 1}
    limit = 4e-4 if dtype == FP32 else LIMITS[dtype]
    close(made, truth, limit)
    if dtype == FP32:
        bare = conv3d(x, packed, padding=padding)
        close(bare, branch, limit)
        assert abs(float((bare * branch).sum() / branch.square().sum()) - 1) < 5e-5
