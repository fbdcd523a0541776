"""The same weights through both classes: TurboDiffusion's WanModel, run from a checkout of it, and
diffusers' transformer, loaded from the folder that `convert` wrote.

`pytest tests/checkpoints/test_their_class.py --turbodiffusion PATH`. Its imports need einops
beside the packages of this library.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.measures import relative_l2
from tests.patching.turbodiffusion_checkout import shim
from turbo_rcm_patch.checkpoints.convert import convert_transformer

#: Its logging and its tools for several GPUs.
UNUSED = ("imaginaire", "imaginaire.utils")
NETWORKS = ("wan2pt1", "wan2pt2")
TEXT_TOKENS = 512  # Its I2V class tells image tokens from text by this number.


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """The module of one of its networks, by name."""
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    before = set(sys.modules)
    with (
        mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in UNUSED}),
        mock.patch.object(sys, "path", [str(Path(given) / "turbodiffusion"), *sys.path]),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
    ):
        modules = [importlib.import_module(f"rcm.networks.{name}") for name in NETWORKS]
        shim(*modules)
        yield dict(zip(NETWORKS, modules, strict=True)).__getitem__
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("rcm", "imaginaire"):
                del sys.modules[name]


CASES = {
    "2.1-t2v": ("wan2pt1", {}),
    "2.1-i2v": ("wan2pt1", {"model_type": "i2v", "in_dim": 8}),
    "2.2-t2v": ("wan2pt2", {}),
    "2.2-i2v": ("wan2pt2", {"model_type": "i2v", "in_dim": 8}),
}


@pytest.mark.parametrize("sla", [False, True], ids=["", "sla"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autocast:UserWarning")
@torch.no_grad()
def test_both_classes_agree(theirs: Callable[[str], Any], case: str, sla: bool, tmp_path) -> None:
    name, options = CASES[case]
    config = dict(in_dim=4, out_dim=4, dim=256, ffn_dim=320, freq_dim=32, text_dim=24, num_heads=2,
                  num_layers=2)  # fmt: skip
    model = theirs(name).WanModel(**{**config, **options})
    for parameter in model.parameters():  # Its head begins at zero.
        parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    for norm in (m for n, m in model.named_modules() if "norm" in n.split(".")[-1]):
        if getattr(norm, "weight", None) is not None:
            norm.weight += 1
    image = options.get("model_type") == "i2v"
    x = torch.randn(2, 4, 3, 8, 12)
    y = torch.randn(2, 4, 3, 8, 12) if image else None
    text = torch.randn(2, TEXT_TOKENS, 24)
    clip = torch.randn(2, 5, 1280) if image and name == "wan2pt1" else None
    time = torch.tensor([[932.0], [608.0]])
    given = {} if clip is None else {"frame_cond_crossattn_emb_B_L_D": clip}
    expected = model(x, time, text, y_B_C_T_H_W=y, **given)
    at_start = model(x, torch.zeros(2, 1), text, y_B_C_T_H_W=y, **given)

    state = model.state_dict()
    if sla:  # As its converter leaves it: a Linear inside the attention, which starts at zero.
        for i in range(2):
            proj_l = f"blocks.{i}.self_attn.attn_op.local_attn.proj_l"
            state |= {
                f"{proj_l}.weight": torch.zeros(128, 128),
                f"{proj_l}.bias": torch.zeros(128),
            }
    torch.save(state, tmp_path / "model.pth")
    convert_transformer(tmp_path / "model.pth", tmp_path / "folder")
    ours = WanTransformer3DModel.from_pretrained(tmp_path / "folder", local_files_only=True).eval()
    inputs = x if y is None else torch.cat([x, y], 1)
    for times, truth, limit in (
        (torch.zeros(2), at_start, 5e-7),
        # Its sinusoids of the time are computed in fp64, diffusers' in fp32.
        (time[:, 0], expected, 3e-6),
    ):
        image_tokens = {"encoder_hidden_states_image": clip, "return_dict": False}
        found = ours(inputs, times, text, **image_tokens)[0]
        error = relative_l2(found, truth)
        print(f"{case}: relative L2 {error:.1e}")
        assert error < limit
