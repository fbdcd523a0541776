"""A patched VAE makes its author's video, and leaves to its author what it does not know.

Every coder of the table in `tests/patching/vae.py` keeps every promise.
"""

from __future__ import annotations

import copy
import importlib.util
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.hooks import apply_group_offloading
from diffusers.models.autoencoders import autoencoder_kl_wan
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.implementations import over
from tests.patching import models, wan_original
from tests.patching.test_threads import together
from tests.patching.vae import (
    COGVIDEOX,
    COMFYUI,
    COMFYUI_22,
    DIFFUSERS,
    ORIGINAL,
    VAE,
    VAES,
    WAN,
    WAN_RESIDUAL,
    conv_in_float64,
    decode,
    encode,
)
from tools.aot import HOPPER, stand_in
from turbo_rcm_patch import is_patched, patch_model, patched, report_of, unpatch_model
from turbo_rcm_patch.errors import (
    AlreadyPatchedError,
    FamilyError,
    NotPatchedError,
    ShapeError,
    UnknownArchitectureError,
)
from turbo_rcm_patch.ops.conv3d.api import conv3d
from turbo_rcm_patch.patching import block
from turbo_rcm_patch.patching import vae as patching_vae
from turbo_rcm_patch.patching.families import wan_coders
from turbo_rcm_patch.patching.measure import ROW_ROOM
from turbo_rcm_patch.patching.vae import distance, kind_of, share

#: fp32 sums in another order; the limit that "fusion alone" has everywhere.
FUSION = 3e-6

every = pytest.mark.parametrize("vae", VAES, ids=lambda vae: vae.name)
every_wan = pytest.mark.parametrize(
    "vae", [vae for vae in VAES if vae is not COGVIDEOX], ids=lambda vae: vae.name
)
diffusers = pytest.mark.parametrize("vae", DIFFUSERS, ids=lambda vae: vae.name)


@pytest.fixture(autouse=True)
def alone() -> Any:
    """No gradients, and nothing of a test is left."""
    with torch.no_grad():
        yield
    undone.undo()


def both(model: Any, z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return decode(model, z), encode(model, x)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_near(found: Any, expected: Any, limit: float = FUSION) -> None:
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < limit


def as_before(model: nn.Module) -> dict[str, Any]:
    """All that a patch may not change for good."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
            if not key.endswith(("_idx", "_num", "_feat_map"))  # scratch of Wan's author
        }
    for name, tensor in model.state_dict(keep_vars=True).items():
        found[f"state {name}"] = (tensor.data_ptr(), tensor.stride(), tensor._version)
    return found


@every
@pytest.mark.parametrize(
    ("frames", "batch", "height", "width"),
    [(1, 1, 4, 6), (2, 2, 3, 5), (5, 1, 4, 6), (5, 2, 3, 5)],
    ids=["image", "two-frames", "five-frames", "five-frames-odd"],
)
def test_the_video_is_the_authors(
    vae: VAE, frames: int, batch: int, height: int, width: int
) -> None:
    model, z = vae.model(), vae.latent(frames, height, width, batch)
    few = {WAN: 7, WAN_RESIDUAL: 7, COGVIDEOX: 8}.get(vae, 5)  # Wan's author leaves two of 7 out
    x = vae.frames({1: 1, 2: few, 5: 17}[frames], batch=batch)
    if batch > 1 and vae in (WAN, COGVIDEOX):  # other shortcuts need whole squares
        x = x[..., :11, :13]
    expected = both(model, z, x)
    report = patch_model(model)
    assert_near(both(model, z, x), expected)
    assert report.fused == len(report.pairs) == vae.pairs
    assert [how.startswith("channels-last") for how in report.ran().values()] == [True, True]
    assert [record.verdict for record in report.guard] == ["kept", "kept"]


@over(reference={"rooms": [(1, 2, 3, 1000)]}, interpreter={"rooms": [(1,)]})
@every_wan
def test_the_bits_do_not_depend_on_the_frames_at_once(
    on: Any, rooms: tuple[int, ...], vae: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own convolution may take another algorithm for another number of frames."""
    count = 3 if on.name == "interpreter" else 4
    model, z, x = vae.model(), vae.latent(count, 2, 2), vae.frames(4 * count - 3, 1, 2)
    patch_model(model, guard=False, impl=on.impl)
    monkeypatch.setattr(patching_vae, "conv3d", conv_in_float64)
    expected = decode(model, z), encode(model, x)
    for room in rooms:
        monkeypatch.setattr(wan_coders, "_FRAMES", room)
        assert torch.equal(decode(model, z), expected[0])
        assert torch.equal(encode(model, x), expected[1])
    if vae in (WAN, WAN_RESIDUAL):
        cache: list[Any] = [None] * 64
        split = model.post_quant_conv(z).split(1, 2)
        parts = [next_frames(model, "decoder", x, cache, not i) for i, x in enumerate(split)]
        video = autoencoder_kl_wan.unpatchify(torch.cat(parts, 2), model.config.patch_size or 1)
        assert torch.equal(video.clamp(-1.0, 1.0), expected[0])


@diffusers
def test_tiles_and_slices_are_the_authors(vae: VAE) -> None:
    model = vae.model()
    if vae is COGVIDEOX:
        model.enable_tiling(32, 32)
    else:
        model.enable_tiling(2 * vae.scale, 2 * vae.scale, vae.scale, vae.scale)
    model.enable_slicing()
    height, width = (5, 6) if vae is COGVIDEOX else (3, 4)
    z, x = vae.latent(3, height, width, 2), vae.frames(9, height, width, 2)
    expected = both(model, z, x)
    report = patch_model(model)
    assert_near(both(model, z, x), expected)
    assert all(how.startswith("channels-last") for how in report.ran().values())


@diffusers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_the_error_is_no_larger(vae: VAE, dtype: torch.dtype) -> None:
    model, z, x = vae.model(dtype), vae.latent(2, 2, 3, 3), vae.frames(1, 1, 2)
    truth, given = decode(vae.model(torch.float64), z.double()), z.to(dtype)
    unpatched = decode(model, given)
    report = patch_model(model)
    result = decode(model, given)
    assert result.dtype == encode(model, x.to(dtype)).dtype == dtype
    assert [one.verdict for one in report.guard] == ["kept", "kept"]
    assert 0 < error(result.double(), truth) <= error(unpatched.double(), truth)


def test_bf16_products_of_a_vae_in_fp32_are_closer_than_a_vae_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, model, z = WAN.model(torch.float64), WAN.model(), WAN.latent()
    truth = decode(exact, z.double())
    half = error(decode(WAN.model(torch.bfloat16), z.bfloat16()).double(), truth)
    report = patch_model(model, conv="bf16")
    streams = set()

    def seen(*args: Any, residual: Any = None, **named: Any) -> Any:
        made = conv3d(*args, residual=residual, **named)
        streams.update(() if residual is None else (residual.dtype, made.dtype))
        return made

    monkeypatch.setattr(patching_vae, "conv3d", seen)
    result = decode(model, z)
    assert {result.dtype} == streams == {torch.float32}
    assert 1e-4 < error(result.double(), truth) < 0.9 * half
    assert "convolutions of a VAE in bf16" in str(report)


@over("interpreter", "gpu")
@diffusers
def test_the_kernels_make_the_authors_video(on: Any, vae: VAE) -> None:
    torch.backends.cudnn.allow_tf32 = False
    model, z, x = vae.model().to(on.device), vae.latent(2, 2, 3), vae.frames(5, 1, 2)
    z, x = z.to(on.device), x[:, :, : 1 if vae is COGVIDEOX else 5].to(on.device)
    expected = both(model, z, x)
    patch_model(model, impl=on.impl)
    assert_near(both(model, z, x), expected)


def test_a_vae_that_cannot_be_shared_says_so() -> None:
    model = COGVIDEOX.model()
    with pytest.raises(NotPatchedError, match="share: vae"):
        share(model, None)
    patch_model(model)
    assert not share(model, None)


# --- undo ----------------------------------------------------------------------------------------


@every
def test_undo_leaves_nothing(vae: VAE) -> None:
    model, z, x = vae.model(), vae.latent(), vae.frames()
    before, expected = as_before(model), both(model, z, x)
    patch_model(model)
    both(model, z, x)
    assert as_before(model) != before
    unpatch_model(model)
    assert as_before(model) == before
    assert all(map(torch.equal, both(model, z, x), expected))


def test_a_copy_of_a_patched_vae_is_a_patched_vae() -> None:
    model, z = WAN.model(), WAN.latent()
    expected = decode(model, z)
    patch_model(model)
    other = copy.deepcopy(model)
    for weight in model.parameters():
        weight.zero_()
    assert error(decode(other, z), expected) < FUSION
    unpatch_model(other)
    assert not is_patched(other) and is_patched(model)
    assert torch.equal(decode(other, z), expected)


def test_of_an_unknown_class_or_signature_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(AutoencoderKLWan):  # type: ignore[misc]
        pass

    class WanVAE_(nn.Module):  # noqa: N801
        pass

    def forward(self: Any, x: Any, cache: Any, feat_idx: Any) -> Any:
        return x

    WanVAE_.__qualname__ = "WanVAE_"
    for cls, config in ((Other, {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1}), (WanVAE_, {})):
        with pytest.raises(UnknownArchitectureError, match=cls.__name__):
            patch_model(cls(**config))
    monkeypatch.setattr(wan_original.ResidualBlock, "forward", forward)
    with pytest.raises(FamilyError, match=r"feat_cache.*cache"):
        patch_model(COMFYUI.model())


# --- what the author's code runs -----------------------------------------------------------------


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


class _Same(nn.Module):
    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def _compile(model: Any) -> None:
    model.decoder = torch.compile(model.decoder, backend="eager")


def _compile_in_place(model: Any) -> None:
    model.decoder.compile(backend="eager")


def at(path: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of one module of the decoder."""
    return lambda model: change(model.decoder.get_submodule(path))


def replaced(path: str, module: Callable[[], nn.Module] = nn.Identity) -> Callable[[Any], Any]:
    """A change of the decoder: another module at a path."""
    parent, _, name = path.rpartition(".")
    return at(parent, lambda owner: setattr(owner, name, module()))


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result is larger."""

    def larger(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        getattr(out, "sample", out).mul_(1.1)
        return out

    larger.__name__ = function.__name__
    return larger


def everywhere(match: Any, **settings: Any) -> Callable[[Any], None]:
    """A change of attributes of all modules that match, or are of some kinds; a function makes the
    new value from the module."""

    def change(model: Any) -> None:
        for module in model.modules():
            if kind_of(module) in match.split() if isinstance(match, str) else match(module):
                for name, value in settings.items():
                    if hasattr(module, name):
                        new = value(module) if callable(value) else value
                        module._modules.pop(name, None)
                        setattr(module, name, new)

    return change


#: Undoes the changes of a test that are not of a model.
undone = pytest.MonkeyPatch()


def replaces(owner: Any, name: str) -> Callable[[Any], None]:
    """A change of a function where it stands, or of the model's class."""

    def change(model: Any) -> None:
        place = owner or type(model)
        undone.setattr(place, name, scaled(getattr(place, name)))

    return change


def kernels(dims: int) -> Callable[[Any], bool]:
    """Whether a module is a convolution with 3 x 3 taps in so many dimensions."""
    return lambda module: (
        isinstance(module, (nn.Conv2d, nn.Conv3d)[dims - 2]) and module.kernel_size[-1] == 3
    )


def doubled(conv: Any) -> Any:
    """The padding in space that dilated taps need."""
    return tuple(2 * n for n in conv.padding)


def grouped(model: Any) -> None:
    for conv in filter(kernels(3), model.modules()):
        if conv.in_channels % 2 == conv.out_channels % 2 == 0:
            half = conv.weight[:, : conv.in_channels // 2] * 1.4
            conv.groups, conv.weight = 2, nn.Parameter(half, requires_grad=False)


def longer(model: Any) -> None:
    for module in [module for module in model.modules() if hasattr(module, "resample")]:
        module.resample.append(nn.SiLU())


def subclassed(model: Any) -> None:
    """Another class of the same name, with another function."""
    cls, name = type(model), "_decode" if hasattr(model, "_decode") else "decode"
    model.__class__ = type(cls.__name__, (cls,), {name: scaled(getattr(cls, name))})


LAYERS, BLOCKS = "its layers are not the author's", "its blocks are not the author's"
CONVOLUTION = "its stride, padding, groups or dilation are not the author's"
RESNETS = "ResidualBlock ResnetBlock3D"
WANS = tuple(vae for vae in VAES if vae is not COGVIDEOX)
#: Functions of torch, and the VAEs that run them.
FUNCTIONS = dict.fromkeys(("conv2d", "conv3d", "interpolate", "pad", "silu"), VAES)
FUNCTIONS |= {"normalize": WANS, "group_norm": (COGVIDEOX,), "avg_pool1d": (COGVIDEOX,)}
#: A change of the decoder, the VAEs that have it, and why the author's code runs; "" where it
#: changes the encoder too.
CHANGES: dict[str, tuple[Callable[[Any], Any], tuple[VAE, ...], str]] = {
    "hook": (at("mid_block", hooked), (WAN, COGVIDEOX), "mid_block has torch hooks"),
    "outer-hook": (at("", hooked), VAES, "decoder has torch hooks"),
    "forward": (
        at("conv_out", lambda conv: setattr(conv, "forward", scaled(conv.forward))),
        (WAN,), "conv_out has a replaced forward",
    ),
    "no-norm": (replaced("up_blocks.0.resnets.0.norm1"), (WAN,), LAYERS),
    "no-end": (replaced("norm_out"), (WAN,), BLOCKS),
    "other-end": (replaced("conv_act", partial(nn.Dropout, 0.0)), (COGVIDEOX,), LAYERS),
    "other-block": (replaced("up_blocks.0.resnets.1", _Same), (WAN,), "is a _Same, which is not"),
    "original-layers": (replaced("middle.0.residual.1"), (COMFYUI,), LAYERS),
    "original-block": (replaced("middle.0", nn.SELU), (COMFYUI,), BLOCKS),
    "large-taps": (
        replaced("up_blocks.0.upsamplers.0.resample.1", partial(nn.Conv2d, 32, 16, 5, padding=2)),
        (WAN,), CONVOLUTION,
    ),
    "compiled": (
        lambda vae: setattr(vae, "decode", torch.compile(vae.decode, backend="eager")),
        (WAN,), "_decode is compiled",
    ),
    "subclass": (subclassed, VAES, "the class of the VAE was replaced"),
    "norm.scale": (everywhere("RMS_norm", scale=lambda norm: 1.1 * norm.scale), WANS, ""),
    "norm.bias": (everywhere("RMS_norm", bias=0.5), WANS, ""),
    "norm.bias-of-channels": (
        everywhere("RMS_norm", bias=lambda norm: nn.Parameter(0.3 * norm.gamma)), WANS, ""
    ),
    "norm.eps": (everywhere("GroupNorm", eps=1.0), (COGVIDEOX,), ""),
    "norm.num_groups": (everywhere("GroupNorm", num_groups=2), (COGVIDEOX,), ""),
    "causal-padding": (
        everywhere(
            lambda module: kind_of(module) == "CausalConv3d" and module.kernel_size[2] == 3,
            _padding=(2, 0, 1, 1, 2, 0),
        ),
        WANS, "",
    ),
    "pad.padding": (everywhere("ZeroPad2d", padding=(1, 0, 1, 0)), WANS, ""),
    "pad.value": (everywhere("ZeroPad2d", value=1.0), WANS, ""),
    "bilinear": (everywhere("Upsample", mode="bilinear"), WANS, ""),
    "attention": (
        everywhere("AttentionBlock", optimized_attention=lambda _: torch.addcmul),
        (COMFYUI, COMFYUI_22), "",
    ),
    "padding_mode": (everywhere(kernels(2), padding_mode="circular"), VAES, ""),
    "dilation": (
        everywhere(
            kernels(3), dilation=(1, 2, 2), padding=doubled, _padding=(2, 2, 2, 2, 2, 0)
        ),
        VAES, "",
    ),
    "groups": (grouped, VAES, ""),
    "stride": (
        everywhere(kernels(2), stride=lambda conv: (3 - conv.stride[0],) * 2),
        (WAN, ORIGINAL, COMFYUI), "",
    ),
    "nonlinearity": (everywhere(RESNETS, nonlinearity=lambda _: torch.tanh), DIFFUSERS, ""),
    "longer": (longer, WANS, ""),
    "method": (
        everywhere(kernels(3), _conv_forward=lambda conv: scaled(conv._conv_forward)), VAES, ""
    ),
    "batches-of-frames": (
        everywhere(
            lambda _: True, num_latent_frames_batch_size=1, num_sample_frames_batch_size=4
        ),
        (COGVIDEOX,), "",
    ),
    **{name: (replaces(nn.functional, name), vaes, "") for name, vaes in FUNCTIONS.items()},
    "conv-of-class": (replaces(nn.Conv3d, "_conv_forward"), VAES, ""),
    "upsample-of-class": (replaces(nn.Upsample, "forward"), WANS, ""),
    **{name: (replaces(None, name), DIFFUSERS, "") for name in ("_decode", "_encode")},
    **{name: (replaces(None, name), (ORIGINAL,), "") for name in ("decode", "encode")},
}  # fmt: skip
#: Those that come after patching alone, and that only a call tells.
LATER = ("compiled", "subclass")


@pytest.mark.parametrize(
    ("name", "vae", "before"),
    [
        (name, vae, before)
        for name, (_, vaes, reason) in CHANGES.items()
        for vae in vaes
        for before in ((False, True) if reason and name not in LATER else (False,))
    ],
    ids=lambda one: {True: "before", False: "after"}.get(one) or getattr(one, "name", one),
)
def test_a_change_counts_before_and_after_patching(name: str, vae: VAE, before: bool) -> None:
    change, _, reason = CHANGES[name]
    model, twin, z, x = vae.model(), vae.model(), vae.latent(3, 2, 3), vae.frames(9, 1, 2)
    as_made = both(twin, z, x)
    report = None if before else patch_model(model, guard=False)
    for one in (twin, model):
        torch.manual_seed(0)
        change(one)
    report = report or patch_model(model, guard=False)
    expected, results = both(twin, z, x), both(model, z, x)
    assert_near(results, expected)
    if not reason:
        changed = [
            a.shape != b.shape or error(a, b) > 1e-3
            for a, b in zip(as_made, expected, strict=True)
        ]
        assert any(changed)
        assert name not in FUNCTIONS or f"{name} was replaced" in report.ran()["decoder"]
        return
    assert torch.equal(results[0], expected[0])
    assert reason in report.ran()["decoder"]
    if name not in LATER:
        reasons = [pair for pair in report.pairs if pair.reason]
        assert any(reason in pair.reason for pair in reasons)
        assert all(pair.path.startswith("decoder") for pair in reasons)


@pytest.mark.parametrize(("frames", "window"), [(7, 4), (9, 2)])
def test_other_numbers_of_frames_are_encoded_by_the_author(frames: int, window: int) -> None:
    model, twin, x = COMFYUI.model(), COMFYUI.model(), COMFYUI.frames(frames)
    report = patch_model(model)
    model.temporal_window = window
    assert torch.equal(encode(model, x), encode(twin, x))
    assert f"{frames} frames in windows of {window}" in report.ran()["encoder"]


@pytest.mark.parametrize("right", [True, False])
def test_padding_as_comfyuis_newest_has_it(right: bool) -> None:
    """An integer in time, and the rest as the convolution's own."""
    model, z = COMFYUI.model(), COMFYUI.latent()
    expected = decode(model, z)
    for module in model.decoder.modules():
        if isinstance(module, wan_original.CausalConv3d):
            _, width, _, height, module._padding, _ = module._padding
            module.padding = (0, height, width if right else 1 + width)
    report = patch_model(model, guard=False)
    if right:
        assert error(decode(model, z), expected) < FUSION
    assert ("its stride, padding, groups or" in str(report)) == (not right)


def test_autocast_and_other_dtypes_are_the_authors() -> None:
    model, twin, z = WAN.model(), WAN.model(), WAN.latent()
    report = patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decode(model, z), decode(twin, z))
    assert "autocast" in report.ran()["decoder"]
    model.double(), twin.double()
    assert torch.equal(decode(model, z.double()), decode(twin, z.double()))
    assert "float64" in report.ran()["decoder"]


@pytest.mark.parametrize(
    ("vae", "name"),
    [(WAN, "z"), (WAN, "post_quant_conv"), (WAN, "quant_conv"), (COMFYUI, "conv2"),
     (COMFYUI, "conv1")],
    ids=lambda one: getattr(one, "name", one),
)  # fmt: skip
def test_gradients_are_the_authors(vae: VAE, name: str) -> None:
    """Of the latent, or of a convolution before or after the coder alone."""
    model, twin, gradients = vae.model(), vae.model(), []
    report = patch_model(model)
    for one in (model, twin):
        z = vae.latent()
        wanted = (z if name == "z" else getattr(one, name).weight).requires_grad_()
        with torch.enable_grad():
            encodes = name in ("quant_conv", "conv1")
            out = encode(one, vae.frames()) if encodes else decode(one, z)
            out.square().sum().backward()
        gradients.append(wanted.grad)
    assert gradients[0] is not None and torch.equal(*gradients)
    assert "gradient" in report.ran()["encoder" if encodes else "decoder"]


def test_a_function_of_the_vae_replaced_before_is_left() -> None:
    model, z = WAN.model(), WAN.latent()
    inner = model._decode
    model._decode = lambda *args, **kwargs: inner(*args, **kwargs)
    report = patch_model(model)
    expected = decode(WAN.model(), z)
    assert torch.equal(decode(model, z), expected)
    assert any("replaced by other code" in pair.reason for pair in report.pairs)


def next_frames(model: Any, part: str, x: Any, cache: list[Any], first: bool = False) -> Any:
    """Call a coder by itself, as streaming code does."""
    first_chunk = {"first_chunk": True} if first and part == "decoder" else {}
    index = [0]
    out = getattr(model, part)(x, feat_cache=cache, feat_idx=index, **first_chunk)
    assert index == [sum(frames is not None for frames in cache)]
    return out


@pytest.mark.parametrize(
    ("vae", "part", "chunks"),
    [
        *((vae, "decoder", [1, 1, 2, 3]) for vae in (WAN, WAN_RESIDUAL, ORIGINAL)),
        *((vae, "encoder", [1, 4, 8]) for vae in (WAN, WAN_RESIDUAL)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_coder_called_chunk_by_chunk_is_fast(vae: VAE, part: str, chunks: list[int]) -> None:
    model, twin = vae.model(), vae.model()
    start = next(x for x in getattr(model, part).modules() if "CausalConv3d" in type(x).__name__)
    x = torch.randn(
        2, start.in_channels, sum(chunks), *((6, 8) if part == "decoder" else (16, 32))
    )
    report = patch_model(model)
    theirs, ours, both = [None] * 64, [None] * 64, [None] * 64
    for index, frames in enumerate(x.split(chunks, 2)):
        first = not index
        expected = next_frames(twin, part, frames, theirs, first)
        assert error(next_frames(model, part, frames, ours, first), expected) < FUSION
        assert report.ran()[part].startswith("channels-last")
        either = (model, twin)[index % 2]
        out = next_frames(either, part, frames, both, first).contiguous()
        assert error(out, expected) < FUSION
    assert [record.verdict for record in report.guard] == ["kept", "kept"]


@pytest.mark.parametrize(
    ("frames", "change", "reason"),
    [
        (2, lambda model, cache: cache.__setitem__(slice(None), [None] * 64), "2 frames at once"),
        (1, lambda model, cache: cache.__setitem__(5, None), "feat_cache"),
        (1, lambda model, cache: hooked(model.decoder), "torch hooks"),
        (1, lambda model, cache: hooked(model.decoder.mid_block), "torch hooks"),
        (1, lambda model, cache: model.decoder.compile(backend="eager"), None),
    ],
)
def test_other_calls_of_a_coder_are_the_authors(frames: int, change: Any, reason: Any) -> None:
    model, twin = WAN.model(), WAN.model()
    report = patch_model(model)
    cache: list[Any] = [None] * 64
    next_frames(model, "decoder", WAN.latent(1), cache, first=True)
    change(model, cache)
    copied, x = [*cache], WAN.latent(frames)
    assert torch.equal(
        next_frames(model, "decoder", x, cache), next_frames(twin, "decoder", x, copied)
    )
    assert reason is None or reason in report.ran()["decoder"]
    assert torch.equal(model.decoder(x), twin.decoder(x))


def test_a_cache_of_another_size_is_refused_and_kept() -> None:
    model = WAN.model()
    patch_model(model)
    cache: list[Any] = [None] * 64
    next_frames(model, "decoder", WAN.latent(1), cache, first=True)
    before = [*cache]
    with pytest.raises(ShapeError, match="Begin each video with an empty cache"):
        next_frames(model, "decoder", WAN.latent(1, width=5), cache)
    assert all(map(operator.is_, cache, before))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("change", [_compile, _compile_in_place])
def test_a_compiled_decoder_runs_the_fast_path(change: Any, before: bool) -> None:
    model, z = WAN.model(), WAN.latent(2, 2, 3)
    expected = decode(model, z)
    if before:
        change(model)
    report = patch_model(model)
    if not before:
        change(model)
    assert error(decode(model, z), expected) < FUSION
    assert report.ran()["decoder"].startswith("channels-last")
    hooked(model.decoder)
    assert torch.equal(decode(model, z), expected)
    assert report.ran()["decoder"].startswith("in the original code")


# --- the guard -----------------------------------------------------------------------------------


@diffusers
def test_the_guard_gives_a_wrong_decoder_back(vae: VAE, monkeypatch: pytest.MonkeyPatch) -> None:
    model, z = vae.model(), vae.latent()
    expected = decode(model, z)
    report = patch_model(model)
    family = type(getattr(model, "_decode", model.decode).__self__)
    name = "run_batch" if vae is COGVIDEOX else "run_frames"
    inner = getattr(family, name)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, *args, **kwargs)
        (out[0] if vae is COGVIDEOX else out)[..., -1, :] = 0  # one row of pixels
        return out

    monkeypatch.setattr(family, name, wrong)
    assert torch.equal(decode(model, z), expected)
    assert report.guard[0].verdict == "runs the original code"
    assert "a row of pixels" in report.guard[0].where
    if vae is WAN:
        model, twin, caches = vae.model(), vae.model(), ([None] * 64, [None] * 64)
        report = patch_model(model)
        for index, frame in enumerate(z.split(1, 2)):
            out, theirs = (
                next_frames(one, "decoder", frame, cache, not index)
                for one, cache in zip((model, twin), caches, strict=True)
            )
            assert torch.equal(out, theirs)
    monkeypatch.undo()
    assert torch.equal(decode(model, z), expected)
    assert "row" in report.ran()["decoder"] and len(report.guard) == 1
    assert all(pair.runs == "as-written" for pair in report.pairs if "decoder" in pair.path)


def test_the_guard_compares_once_and_on_request() -> None:
    model, z = WAN.model(), WAN.latent()
    report = patch_model(model)
    for _ in range(2):
        decode(model, z), encode(model, WAN.frames())
    assert [one.path for one in report.guard] == ["decoder", "encoder"]
    assert all(one.verdict == "kept" and one.error < 1e-5 for one in report.guard)
    report.guard.check_next()
    decode(model, z)
    assert len(report.guard) == 3


@every
def test_a_latent_with_nan_is_left_to_the_author(vae: VAE) -> None:
    model, z = vae.model(), vae.latent()
    report = patch_model(model)
    bad = z.clone()
    bad[0, 0, 0, 1, 1] = float("nan")
    assert torch.equal(decode(model, bad).isnan(), decode(vae.model(), bad).isnan())
    assert "NaN" in report.ran()["decoder"] and report.guard[0].verdict == "not compared"
    decode(model, z)
    assert report.guard[1].verdict == "kept"


# --- videos, threads, devices --------------------------------------------------------------------


@diffusers
def test_videos_of_other_sizes_and_threads_do_not_meet(vae: VAE) -> None:
    model = vae.model()
    given = [vae.latent(3, 4, 6), vae.latent(2, 3, 4), vae.latent(1, 5, 5, 2)]
    expected = [decode(model, z) for z in given]
    patch_model(model)

    def run(i: int) -> None:
        with torch.no_grad():
            assert error(decode(model, given[i]), expected[i]) < FUSION

    together(3, run)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("vae", "options"),
    [(WAN, ("block_level", 1)), *((vae, ("leaf_level",)) for vae in DIFFUSERS)],
    ids=lambda case: getattr(case, "name", str(case)),
)
def test_group_offloading_is_the_authors(vae: VAE, options: Any, before: bool) -> None:
    model, z = vae.model(), vae.latent()
    expected = decode(model, z)
    offload = partial(apply_group_offloading, model, *[torch.device("cpu")] * 2, *options)
    if before:
        offload()
    report = patch_model(model)
    if not before:
        offload()
    assert torch.equal(decode(model, z), expected)
    assert "group_offloading" in report.ran()["decoder"]
    unpatch_model(model)
    assert torch.equal(decode(model, z), expected)


def test_model_offloading_keeps_the_fast_path() -> None:
    model, z = WAN.model(), WAN.latent()
    expected = decode(model, z)
    report = patch_model(model)
    accelerate.cpu_offload_with_hook(model, "cpu")
    assert error(decode(model, z), expected) < FUSION
    assert report.ran()["decoder"].startswith("channels-last")


# --- memory --------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(*(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)))
        return out

    def count(self, *tensors: torch.Tensor) -> None:
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            if (key := storage._cdata) not in self.held:
                self.held[key] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, key)
        self.most = max(self.most, sum(self.held.values()))


#: Wan 2.2's VAE as it is published.
WAN_22 = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2,
    "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "latent", "name", "most"),
    [
        ({}, (16, 60, 104), "decode", 0.95),
        ({}, (16, 60, 104), "encode", 0.9),
        (WAN_22, (48, 44, 80), "decode", 0.98),  # torch's convolutions, whose format is copied
        (WAN_22, (48, 44, 80), "encode", 0.9),
    ],
    ids=["2.1-decode", "2.1-encode", "2.2-decode", "2.2-encode"],
)
def test_the_peak_of_memory_is_below_the_unpatched_ones(
    config: Any, latent: Any, name: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the published sizes, on the meta device, where no kernel runs. On a card convolutions
    need buffers beside: about a tenth more."""
    channels, *size = latent
    with torch.device("meta"):
        model = AutoencoderKLWan(**config).bfloat16().requires_grad_(False)
        given = torch.empty(1, channels, 9, *size, dtype=torch.bfloat16)
        if name == "encode":
            scale = model.spatial_compression_ratio
            given = torch.empty(1, 3, 33, *(scale * n for n in size), dtype=torch.bfloat16)
    attention = "scaled_dot_product_attention"
    monkeypatch.setattr(nn.functional, attention, lambda q, *_, **__: torch.empty_like(q))
    monkeypatch.setattr(block, "why_not_inference", lambda *_: "")  # the mode
    peaks = []
    for patch in (False, True):
        if patch:
            patch_model(model, guard=False)
        with stand_in(HOPPER, launch=lambda *_, **__: None), Live() as live:
            live.count(*model.parameters(), given)
            getattr(model, name)(given)
        peaks.append(live.most)
    assert peaks[1] < most * peaks[0], peaks


# --- weights that ComfyUI casts ------------------------------------------------------------------


#: ComfyUI's convolutions: their weights may be elsewhere, and are changed when they are read.
LENDER = """
import torch
lent = []

class _Lends:
    comfy_cast_weights = True

class Conv2d(torch.nn.Conv2d, _Lends):
    def forward(self, x):
        return self._conv_forward(x, *cast_bias_weight(self, x)[:2])

class Conv3d(torch.nn.Conv3d, _Lends):
    def forward(self, x):
        return self._conv_forward(x, *cast_bias_weight(self, x)[:2])

def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None, offloadable=False):
    dtype = dtype if input is None else input.dtype
    weight, bias = s.weight.to(dtype) * 1.5, s.bias.to(dtype) + 0.1
    if not offloadable:
        return weight, bias
    lent.append(s)
    return weight, bias, s

def uncast_bias_weight(s, weight, bias, stream):
    lent.remove(stream)
    weight.fill_(torch.nan)  # It belongs to the lender again.
    bias.fill_(torch.nan)
"""


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The VAEs over ComfyUI's convolutions, as a module."""
    lender = ModuleType("comfy.ops")
    exec(LENDER, vars(lender))
    monkeypatch.setitem(sys.modules, "comfy.ops", lender)
    spec = importlib.util.spec_from_file_location("casting.wan", Path(wan_original.__file__))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "casting.wan", module)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize("patches", [False, True], ids=["2.1", "2.2"])
def test_weights_that_comfyui_casts_are_read_as_it_casts_them(comfy: Any, patches: bool) -> None:
    vae = VAE("", partial(comfy.WanVAE, patches=patches), 4, 8 if patches else 4, 0)
    model, z, x = vae.model(), vae.latent(), vae.frames()
    model.bfloat16(), model.float()  # Rounding is no part of the comparison.
    expected = both(model, z, x)
    for name, weight in model.named_parameters():
        if not name.startswith("conv") and "gamma" not in name:
            weight.data = weight.data.bfloat16()  # as if it was kept elsewhere
    report = patch_model(model)
    assert_near(both(model, z, x), expected)
    assert all(how.startswith("channels-last") for how in report.ran().values())
    assert not comfy.ops.lent


# --- a pipeline ----------------------------------------------------------------------------------


def pipeline(vae: Any) -> Any:
    return SimpleNamespace(transformer=models.WAN.model(), vae=vae)


def test_a_pipeline_is_patched_with_its_vae_in_one_report() -> None:
    pipe, z = pipeline(WAN.model()), WAN.latent()
    expected = decode(pipe.vae, z)
    report = patch_model(pipe)
    assert {pair.path.partition(".")[0] for pair in report.pairs} == {"transformer", "vae"}
    assert error(decode(pipe.vae, z), expected) < FUSION
    assert report_of(pipe).fused == report.fused
    unpatch_model(pipe)
    assert not is_patched(pipe) and not is_patched(pipe.vae)
    assert torch.equal(decode(pipe.vae, z), expected)
    patch_model(pipe.transformer)
    assert not is_patched(pipe.vae)
    unpatch_model(pipe)
    report = patch_model(pipe, vae=False)
    assert not is_patched(pipe.vae)
    assert "the VAE (AutoencoderKLWan) is not patched" in str(report)


def test_two_pipelines_share_a_vae() -> None:
    """Undo undoes what its call did."""
    vae, z = WAN.model(), WAN.latent()
    first, second = pipeline(vae), pipeline(vae)
    expected = decode(vae, z)
    patch_model(first)
    report = patch_model(second, attention="exact")
    assert {pair.path.partition(".")[0] for pair in report.pairs} == {"transformer", "vae"}
    unpatch_model(second)
    assert not is_patched(second.transformer) and is_patched(vae) and is_patched(first)
    with patched(second):
        assert is_patched(second.transformer)
    assert error(decode(vae, z), expected) < FUSION and is_patched(vae)
    with pytest.raises(AlreadyPatchedError, match="vae=False"):
        patch_model(second, conv="bf16")
    with pytest.raises(AlreadyPatchedError, match="patch_model: vae"):
        patch_model(SimpleNamespace(vae=vae))
    unpatch_model(first)
    assert not is_patched(vae) and torch.equal(decode(vae, z), expected)


def test_an_unknown_vae_of_a_pipeline_is_left_and_named() -> None:
    pipe = pipeline(nn.Linear(2, 2))
    assert "the VAE (Linear) is not patched" in str(patch_model(pipe))
    unpatch_model(pipe)


ROW = (..., 1, 3, slice(None))


@pytest.mark.parametrize(
    ("where", "place", "size"),
    [
        ("a frame", (..., 1, slice(None), slice(None)), 1.0),
        ("a row of pixels", ROW, 1.0),
        ("a row of pixels", ROW, 0.1),
        ("a column of pixels", (..., 1, slice(None), 7), 1.0),
    ],
)
def test_the_guard_finds_a_frame_a_row_and_a_column(where: str, place: Any, size: float) -> None:
    """The error is that of the part alone, of a half of the channels alone, and relative to the
    frame where the part is dark."""
    author = torch.ones(1, 4, 3, 40, 50)
    author[place] = size
    fast = author.clone()
    fast[place][:, 2:] += 0.1
    room = 1.0 if where == "a frame" else ROW_ROOM
    error = 0.1 / room / float(author[:, :, 1].square().mean().sqrt())
    assert distance(fast, author, 2) == (pytest.approx(error, rel=1e-3), where)
    assert distance(fast, author)[0] == pytest.approx(error / 2**0.5, rel=1e-3)
