"""How much Python and how many launches stand between a block and its kernels, with ceilings.

Counted on a CPU, over launches that are written down: a call counter does not depend on the
machine. Whoever passes a ceiling has made every forward of every user slower.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel
from triton.runtime.jit import JITFunction

from tests.launches import Compiled, write_down_launches
from tests.patching import turbodiffusion, wan
from tests.patching.sla import with_sla
from turbo_rcm_patch import PatchConfig, patch_model
from turbo_rcm_patch.kernels import ahead
from turbo_rcm_patch.kernels.portable import project
from turbo_rcm_patch.patching import block as block_module
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.block import BlockForward

WAN = {
    "num_attention_heads": 2, "attention_head_dim": 128, "in_channels": 4, "out_channels": 4,
    "text_dim": 32, "ffn_dim": 512, "freq_dim": 32, "num_layers": 1,
}  # fmt: skip
COGVIDEOX = {
    "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 4, "out_channels": 4,
    "time_embed_dim": 16, "text_embed_dim": 16, "num_layers": 1, "sample_width": 8,
    "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 8,
}  # fmt: skip


def calls_of(function: Callable[[], object]) -> tuple[int, int]:
    """Python functions and built-in functions that a call runs."""
    counted: Counter[str] = Counter()

    def profile(frame: object, event: str, arg: object) -> None:
        counted[event] += 1

    gc.collect()
    gc.disable()  # What others have it call is none of ours.
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted["call"], counted["c_call"]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def of_wan(
    *, sla: bool = False, lora: str = "", **config: Any
) -> tuple[Any, Any, tuple[Any, ...]]:
    model: Any = WanTransformer3DModel(**{**WAN, **config}).to(torch.bfloat16).eval()
    if sla:
        with_sla(model)
    if lora:
        wan.with_lora(model, lora)
        model.to(torch.bfloat16)
    table, text = torch.randn(1, 32, 1, 128), 520 if config else 8
    rotary = (table, table + 1)
    inputs = (noise(1, 32, 256), noise(1, text, 256), torch.randn(1, 6, 256), rotary)
    return model, model.blocks[0], inputs


def of_cogvideox() -> tuple[Any, Any, tuple[Any, ...]]:
    model: Any = CogVideoXTransformer3DModel(**COGVIDEOX).to(torch.bfloat16).eval()
    table = torch.randn(32, 64)
    inputs = (noise(1, 32, 128), noise(1, 8, 128), noise(1, 16), (table, table + 1))
    return model, model.transformer_blocks[0], inputs


def of_turbodiffusion(sparse: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    model: Any = turbodiffusion.tiny(dim=256, layers=1, checkpoint=False)
    for name, parameter in model.named_parameters():
        if "modulation" not in name:
            parameter.data = parameter.data.bfloat16()
    if sparse:
        turbodiffusion.with_sparse(model)
    inputs = (
        noise(1, 256, 256), torch.randn(1, 6, 256), torch.tensor([256]), torch.randn(256, 64),
        noise(1, 8, 256), None,
    )  # fmt: skip
    return model, model.blocks[0], inputs


class Block:
    """A patched block that runs by its plan, its launches written down."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        made: Callable[[], tuple[Any, Any, tuple[Any, ...]]],
        **options: Any,
    ) -> None:
        monkeypatch.setattr(patch, "_check_device", lambda *args: None)
        monkeypatch.setattr(project, "by_library", lambda x: True)  # as on a GPU
        self.log = write_down_launches(monkeypatch)
        self.model, self.block, self.inputs = made()
        patch_model(self.model, PatchConfig(impl="triton", guard=False, **options))
        for _ in range(4):
            self()
        self.log.clear()

    def __call__(self) -> None:
        with torch.no_grad():
            self.block(*self.inputs)

    @property
    def replayed(self) -> int:
        """How many of the launches were replays, which hold no tensors."""
        return sum(all(not hasattr(v, "dtype") for v in values) for _, _, values in self.log)


@pytest.mark.parametrize(
    ("made", "options", "python", "builtin", "launches"),
    [
        pytest.param(of_wan, {}, 168, 182, 9, id="wan"),
        pytest.param(of_wan, {"attention": "exact"}, 161, 183, 8, id="wan-exact"),
        pytest.param(of_wan, {"linear": "int8"}, 341, 468, 19, id="wan-int8-linears"),
        pytest.param(lambda: of_wan(added_kv_proj_dim=256), {}, 198, 219, 12, id="wan-image"),
        pytest.param(lambda: of_wan(sla=True), {"sla_topk": 0.5}, 255, 341, 12, id="wan-sla"),
        pytest.param(of_cogvideox, {}, 158, 180, 6, id="cogvideox"),
        pytest.param(of_cogvideox, {"linear": "int8"}, 266, 359, 14, id="cogvideox-int8-linears"),
        pytest.param(lambda: of_turbodiffusion(False), {}, 171, 180, 9, id="turbodiffusion"),
        pytest.param(lambda: of_turbodiffusion(True), {}, 255, 335, 12, id="turbodiffusion-sla"),
    ],
)
def test_a_block_takes_few_steps_to_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], tuple[Any, Any, tuple[Any, ...]]],
    options: dict[str, Any],
    python: int,
    builtin: int,
    launches: int,
) -> None:
    block = Block(monkeypatch, made, **options)
    counted = calls_of(block)
    assert block.replayed == len(block.log), "every launch is a replay"
    assert len(block.log) == launches
    # Newer Pythons count that a context manager of C++ is left.
    builtin += sys.version_info >= (3, 12)
    assert counted[0] <= python and counted[1] <= builtin, counted


#: Functions between a block's forward and the start of a kernel.
MOST_FRAMES = 6


@pytest.mark.parametrize(
    ("made", "options"),
    [
        pytest.param(of_wan, {}, id="wan"),
        pytest.param(of_wan, {"linear": "int8"}, id="wan-int8-linears"),
        pytest.param(of_wan, {"attention": "exact"}, id="wan-exact"),
        pytest.param(lambda: of_wan(added_kv_proj_dim=256), {}, id="wan-image"),
        pytest.param(of_cogvideox, {}, id="cogvideox"),
        pytest.param(of_cogvideox, {"linear": "int8"}, id="cogvideox-int8-linears"),
        pytest.param(lambda: of_turbodiffusion(False), {}, id="turbodiffusion"),
    ],
)
def test_few_frames_lie_between_a_block_and_a_launch(
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], tuple[Any, Any, tuple[Any, ...]]],
    options: dict[str, Any],
) -> None:
    depths: list[list[str]] = []
    own = Compiled.run

    def run(self: Any, *args: Any) -> None:
        frame, names = sys._getframe(), []
        while not isinstance(frame.f_locals.get("self"), BlockForward) or (
            frame.f_code.co_name != "__call__"
        ):
            names.append(frame.f_code.co_qualname)
            assert frame.f_back is not None
            frame = frame.f_back
        depths.append(names)
        own(self, *args)

    monkeypatch.setattr(Compiled, "run", run)
    block = Block(monkeypatch, made, **options)
    depths.clear()
    block()
    assert depths and max(map(len, depths)) <= MOST_FRAMES, max(depths, key=len)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        pytest.param(of_wan, {}, id="wan"),
        pytest.param(of_wan, {"linear": "int8"}, id="wan-int8-linears"),
        pytest.param(of_cogvideox, {}, id="cogvideox"),
    ],
)
def test_a_block_compiles_ahead_what_it_then_launches(
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], tuple[Any, Any, tuple[Any, ...]]],
    options: dict[str, Any],
) -> None:
    compiled: set[str] = set()

    def warmup(self: JITFunction, **arguments: Any) -> None:
        compiled.add(self.__name__)

    monkeypatch.setattr(JITFunction, "warmup", warmup)
    monkeypatch.setattr(block_module, "compile_ahead", ahead.compile_ahead)
    block = Block(monkeypatch, made, **options)
    block()
    # The first forward makes the int8 copies of the weights before.
    assert compiled == {name for name, _, _ in block.log}


def test_a_lora_on_one_linear_is_called_and_the_rest_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Block(monkeypatch, lambda: of_wan(lora="attn1.to_q"))
    calls: list[int] = []
    block.block.attn1.to_q.lora_A["default"].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        block()
    block.log.clear()
    calls.clear()
    block()
    assert len(calls) == 1
    assert block.replayed == len(block.log) == 9


def test_a_hooked_norm_is_called_and_the_rest_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Block(monkeypatch, of_wan)
    calls: list[int] = []
    block.block.norm2.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        block()
    block.log.clear()
    calls.clear()
    block()
    assert len(calls) == 1
    assert block.replayed == len(block.log) == 9, "its skip is a pass of its own again"
    names = [name for name, _, _ in block.log]
    assert names.count("skip_kernel") == 2 and names.count("skip_norm_kernel") == 1
