"""Wan's VAE in its authors' own classes and in ComfyUI's makes its author's video when patched."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching import wan_original
from tests.patching.test_vae import FUSION, as_before, assert_near, error, hooked
from turbo_rcm_patch import patch_model, unpatch_model
from turbo_rcm_patch.errors import FamilyError, UnknownArchitectureError

KINDS = ["WanVAE_", "WanVAE", "WanVAE-2.2"]
every = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def model_of(kind: str, module: Any = wan_original) -> Any:
    name, _, patches = kind.partition("-")
    torch.manual_seed(0)
    model = getattr(module, name)(patches=bool(patches)).eval().requires_grad_(False)
    for key, weight in model.named_parameters():
        if key.endswith("gamma"):
            weight.normal_(1.0, 0.3)
        elif weight.dim() > 1:
            weight.normal_(0.0, 1.4 * weight[0].numel() ** -0.5)
        else:
            weight.normal_(0.0, 0.2)
    return model


def both(model: Any, frames: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A video from a latent, and a latent from a video of 4 n + 1 frames."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(1, 4, frames, 4, 6, generator=generator)
    x = torch.randn(1, 3, 4 * frames - 3, 16, 24, generator=generator)
    scale = [torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([1.0, 2.0, 0.5, 0.7])]
    more = [scale] if type(model).__name__ == "WanVAE_" else []
    return model.decode(z, *more), model.encode(x, *more)


@every
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_the_video_is_the_authors_and_undo_leaves_nothing(kind: str, frames: int) -> None:
    model = model_of(kind)
    expected, before = both(model, frames), as_before(model)
    report = patch_model(model)
    assert_near(both(model, frames), expected)
    assert report.fused == len(report.pairs) == (20 if kind == "WanVAE-2.2" else 12)
    assert all(how.startswith("channels-last") for how in report.ran().values())
    assert [one.verdict for one in report.guard] == ["kept", "kept"]
    unpatch_model(model)
    assert as_before(model) == before
    assert all(map(torch.equal, both(model, frames), expected))


def _norm(model: Any) -> None:
    model.decoder.head[0] = nn.Identity()


def _layers(model: Any) -> None:
    model.decoder.middle[0].residual[1] = nn.Identity()


def _foreign(model: Any) -> None:
    model.decoder.upsamples[0] = nn.Softmax(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda model: hooked(model.decoder.middle[0]), "has torch hooks"),
     (_norm, "its blocks are not the author's"), (_layers, "its layers are not the author's"),
     (_foreign, "is a Softmax, which is not supported"),
     (lambda model: setattr(model.decoder.upsamples[1].resample[0], "mode", "bilinear"),
      "does not repeat pixels")],
)  # fmt: skip
def test_what_is_not_the_authors_runs_as_it_is(change: Any, words: str) -> None:
    model, twin = model_of("WanVAE"), model_of("WanVAE")
    report = patch_model(model)
    change(model), change(twin)
    assert torch.equal(both(model)[0], both(twin)[0])
    assert words in report.ran()["decoder"]
    assert report.ran()["encoder"].startswith("channels-last")


@pytest.mark.parametrize(("frames", "window"), [(7, 4), (9, 2)])
def test_other_numbers_of_frames_are_encoded_by_the_author(frames: int, window: int) -> None:
    model, twin = model_of("WanVAE"), model_of("WanVAE")
    report = patch_model(model)
    model.temporal_window = window
    x = torch.randn(1, 3, frames, 16, 24)
    assert torch.equal(model.encode(x), twin.encode(x))
    assert f"{frames} frames in windows of {window}" in report.ran()["encoder"]


def test_other_classes_of_that_name_are_refused() -> None:
    class WanVAE_(nn.Module):  # noqa: N801
        pass

    WanVAE_.__qualname__ = "WanVAE_"
    with pytest.raises(UnknownArchitectureError, match="WanVAE_"):
        patch_model(WanVAE_())


def test_a_forward_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Any, cache: Any, feat_idx: Any) -> Any:
        return x

    monkeypatch.setattr(wan_original.ResidualBlock, "forward", forward)
    with pytest.raises(FamilyError, match=r"feat_cache.*cache"):
        patch_model(model_of("WanVAE"))


@pytest.mark.parametrize("right", [True, False])
def test_padding_as_comfyuis_newest_has_it(right: bool) -> None:
    """An integer in time, and the rest as the convolution's own."""
    model = model_of("WanVAE")
    expected = both(model)[0]
    for module in model.decoder.modules():
        if isinstance(module, wan_original.CausalConv3d):
            _, width, _, height, module._padding, _ = module._padding
            module.padding = (0, height, width if right else 1 + width)
    report = patch_model(model, guard=False)
    if right:
        assert error(both(model)[0], expected) < FUSION
    assert ("its padding is not the author's" in str(report)) == (not right)


# --- weights that ComfyUI lends ------------------------------------------------------------------


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
    spec = importlib.util.spec_from_file_location("lent.wan", Path(wan_original.__file__))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lent.wan", module)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize("kind", KINDS[1:])
def test_weights_that_are_lent_are_read_as_their_lender_gives_them(comfy: Any, kind: str) -> None:
    model = model_of(kind, comfy)
    model.bfloat16(), model.float()  # Rounding is no part of the comparison.
    expected = both(model)
    for name, weight in model.named_parameters():
        if not name.startswith("conv") and "gamma" not in name:
            weight.data = weight.data.bfloat16()  # as if it was kept elsewhere
    report = patch_model(model)
    assert_near(both(model), expected)
    assert all(how.startswith("channels-last") for how in report.ran().values())
    assert not comfy.ops.lent
