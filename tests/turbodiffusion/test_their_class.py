"""The same weights through both classes: TurboDiffusion's WanModel, run from a checkout of it, and
diffusers' transformer, loaded from the folder that `convert` wrote.

`pytest tests/turbodiffusion/test_their_class.py --turbodiffusion PATH`. Their class needs three
things that a CPU has not: `Tensor.cuda`, a rotary embedding from flash_attn, and an attention;
here the first does nothing and the others are plain torch. What their files import for logging and
for several GPUs is replaced by nothing.
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.measures import relative_l2
from turbo_rcm_patch.turbodiffusion import write_checkpoint
from turbo_rcm_patch.turbodiffusion.convert import convert_transformer

TEXT_TOKENS = 512  # Their I2V class knows image tokens from text by this number.


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """As much of einops as their network uses."""
    into, out = (_groups(side) for side in pattern.split("->"))
    known = dict(sizes)
    if "..." in (name for group in into for name in group):
        return x.flatten(-2)
    for group, size in zip(into, x.shape, strict=True):
        rest = math.prod(known[name] for name in group if name in known)
        for name in group:
            known.setdefault(name, size // rest)
    flat = [name for group in into for name in group]
    x = x.reshape([known[name] for name in flat])
    x = x.permute([flat.index(name) for group in out for name in group])
    return x.reshape([math.prod(known[name] for name in group) for group in out])


def repeat(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """The rotary table's three uses: a table over one axis, the same along the others."""
    axis = pattern.split()[0]
    shape = [-1 if name == axis else 1 for name in "thw"]
    full = [x.shape[0] if name == axis else sizes[name] for name in "thw"]
    return x.reshape(*shape, x.shape[1]).expand(*full, x.shape[1])


def _groups(side: str) -> list[list[str]]:
    result: list[list[str]] = []
    inside = False
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if token in "()":
            inside = token == "("
            if inside:
                result.append([])
        elif inside:
            result[-1].append(token)
        else:
            result.append([token])
    return result


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inplace: bool) -> Tensor:
    assert interleaved and not inplace
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(torch.nn.Module):
    """In place of their attention over several GPUs, with the attribute that SLA goes into."""

    def __init__(self) -> None:
        super().__init__()
        self.local_attn: Any = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Their module of a network, by name."""
    given = request.config.getoption("--turbodiffusion", default=None)
    if not given:
        pytest.skip("needs --turbodiffusion PATH, a checkout of TurboDiffusion")
    root = Path(given) / "turbodiffusion"
    if not (root / "rcm" / "networks").is_dir():
        pytest.fail(f"{given} is not a checkout of TurboDiffusion", pytrace=False)

    def module(name: str, **members: object) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        return made

    quiet = types.SimpleNamespace(info=lambda *_: None)
    none = dict.fromkeys(("split_inputs_cp", "cat_outputs_cp", "cat_outputs_cp_with_grad"))
    stubs = {
        "einops": module("einops", rearrange=rearrange, repeat=repeat),
        "imaginaire": module("imaginaire"),
        "imaginaire.utils": module("imaginaire.utils", log=quiet),
        "rcm.utils.a2a_cp": module("rcm.utils.a2a_cp", MinimalA2AAttnOp=Attention),
        "rcm.utils.context_parallel": module("rcm.utils.context_parallel", broadcast=None, **none),
        "flash_attn": module("flash_attn"),
        "flash_attn.layers": module("flash_attn.layers"),
        "flash_attn.layers.rotary": module("flash_attn.layers.rotary", apply_rotary_emb=rotary),
    }
    before = set(sys.modules)
    with (
        mock.patch.dict(sys.modules, stubs),
        mock.patch.object(sys, "path", [str(root), *sys.path]),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
    ):
        yield lambda name: importlib.import_module(f"rcm.networks.{name}")
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "rcm":
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
def test_both_classes_agree(
    theirs: Callable[[str], Any], case: str, sla: bool, tmp_path: Path
) -> None:
    name, options = CASES[case]
    config = dict(in_dim=4, out_dim=4, dim=256, ffn_dim=320, freq_dim=32, text_dim=24, num_heads=2,
                  num_layers=2)  # fmt: skip
    model = theirs(name).WanModel(**{**config, **options})
    for parameter in model.parameters():  # Their head begins at zero.
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
    if sla:  # As their converter leaves it: a Linear inside the attention, which starts at zero.
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
        # Their sinusoids of the time are computed in fp64, diffusers' in fp32.
        (time[:, 0], expected, 3e-6),
    ):
        image_tokens = {"encoder_hidden_states_image": clip, "return_dict": False}
        found = ours(inputs, times, text, **image_tokens)[0]
        error = relative_l2(found, truth)
        print(f"{case}: relative L2 {error:.1e}")
        assert error < limit

    # And back into their class.
    write_checkpoint(tmp_path / "folder", tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[k], v) for k, v in state.items())
    if not sla:
        twin = theirs(name).WanModel(**{**config, **options})
        twin.load_state_dict(back, assign=True)
        assert torch.equal(twin(x, time, text, y_B_C_T_H_W=y, **given), expected)
