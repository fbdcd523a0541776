"""Several ranks decode parts of a video, and each gets the video that one rank makes.

The same bits, where a convolution's arithmetic does not depend on the height of its input. torch's
on a CPU does, so the tests of bits sum products in float64.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.patching.test_vae import FUSION, decode, encode, error
from tests.patching.vae import COGVIDEOX, VAES, WAN, WAN_RESIDUAL, conv_in_float64
from tests.ranks import on_ranks
from turbo_rcm_patch import patch_model
from turbo_rcm_patch.errors import NotPatchedError
from turbo_rcm_patch.patching import block
from turbo_rcm_patch.patching import vae as patching_vae
from turbo_rcm_patch.patching.vae import share


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As the ranks have: torch adds up in another order with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: The latent: frames, height, width, batch. Rows do not divide evenly among three ranks.
SIZES: list[Any] = [(3, 8, 6, 1), (1, 7, 5, 2), (2, 7, 5, 1)]


def _close(rank: int, expected: torch.Tensor) -> None:
    torch.set_grad_enabled(False)
    model = WAN.model()
    patch_model(model)
    share(model, dist.group.WORLD)
    assert error(decode(model, WAN.latent(*SIZES[0])), expected) < FUSION


def _each(rank: int, cases: list[Any]) -> None:
    for case in cases:
        _shared(rank, *case)


def _shared(rank: int, index: int, size: Any, tiles: bool, expected: torch.Tensor) -> None:
    torch.set_grad_enabled(False)
    patching_vae.conv3d = conv_in_float64
    vae = VAES[index]
    model = vae.model()
    if tiles:
        model.enable_tiling(4 * vae.scale, 4 * vae.scale, 3 * vae.scale, 3 * vae.scale)
    report = patch_model(model)
    assert share(model, dist.group.WORLD)
    ahead: list[Any] = []  # ranks would wait for each other in it
    block.compile_ahead = lambda *given: ahead.append(given)
    found = decode(model, vae.latent(*size))
    assert not ahead
    assert torch.equal(found, expected), float((found - expected).abs().max())
    assert "rows over" in report.ran()["decoder"]
    assert [one.verdict for one in report.guard] == ["kept"]
    other = copy.deepcopy(model)
    if rank == 0:  # A copy belongs to this rank alone.
        assert torch.equal(decode(other, vae.latent(*size)), expected)
        assert torch.equal(decode(pickle.loads(pickle.dumps(model)), vae.latent(*size)), expected)
        encode(model, vae.frames())
    dist.barrier()
    assert share(model, None)
    if rank == 0:
        assert torch.equal(decode(model, vae.latent(*size)), expected)


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, [(WAN, SIZES[0], False)]),
     (3, [(WAN, SIZES[1], False), (WAN_RESIDUAL, SIZES[2], False), (WAN, SIZES[2], True)])],
    ids=["two-ranks", "three-ranks"],
)  # fmt: skip
def test_ranks_make_the_video_of_one(
    world: int, cases: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video; an image of a batch of two, Wan 2.2's VAE, and tiles."""
    monkeypatch.setattr(patching_vae, "conv3d", conv_in_float64)
    given = []
    for vae, size, tiles in cases:
        model = vae.model()
        if tiles:
            model.enable_tiling(4 * vae.scale, 4 * vae.scale, 3 * vae.scale, 3 * vae.scale)
        patch_model(model, guard=False)
        with torch.no_grad():
            expected = decode(model, vae.latent(*size))
        given.append((VAES.index(vae), size, tiles, expected))
    on_ranks(world, _each, given)


def test_with_torchs_convolutions_they_come_close() -> None:
    model = WAN.model()
    with torch.no_grad():
        expected = decode(model, WAN.latent(*SIZES[0]))
    on_ranks(3, _close, expected)


def test_what_cannot_be_shared_says_so() -> None:
    model = COGVIDEOX.model()
    with pytest.raises(NotPatchedError, match="share: vae"):
        share(model, None)
    patch_model(model)
    assert not share(model, None)
