"""The three numbers of a comparison, from the most visible to the most exact: the distance of two
videos, the distance of some network calls from the truth, and the change by the fusion alone.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ShapeError
from turbo_rcm_patch.ops import AttentionSpec, attention_skip
from turbo_rcm_patch.ops.attention.api import attend_and_project
from turbo_rcm_patch.ops.formats import AttentionInputs, Skip
from turbo_rcm_patch.patching import sla_as_defined
from turbo_rcm_patch.patching.find import execution_device
from turbo_rcm_patch.patching.int8_weights import Int8Linear
from turbo_rcm_patch.patching.plan import Plan
from turbo_rcm_patch.video.judged import judged

# Wang et al. 2004, as scikit-image computes it with gaussian_weights=True,
# use_sample_covariance=False.
SSIM_SIGMA: Final = 1.5
SSIM_SIDE: Final = 11
SSIM_C1: Final = 0.01**2
SSIM_C2: Final = 0.03**2
#: Most calls of a network that are kept of a video, and replayed for the network number.
CALLS: Final = 4
#: The keyword arguments of a call of a network.
Call = Mapping[str, Any]
#: Called with (steps done, steps in all).
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of one video from another.

    Attributes:
        psnr: PSNR of the whole video in dB; infinite if the frames are equal, NaN if either has a
            NaN.
        ssim: Mean SSIM over frames.
        frame_psnr: PSNR of each frame.
        vmaf: VMAF of the whole video, 0..100, None if it was not measured (see `filters`).
    """

    psnr: float
    ssim: float
    frame_psnr: tuple[float, ...]
    vmaf: float | None = None

    @property
    def worst_frame(self) -> int:
        """Index of the frame with the lowest PSNR; a frame with a NaN is worse than any."""
        order = [(not math.isnan(value), value) for value in self.frame_psnr]
        return order.index(min(order))

    @property
    def worst_psnr(self) -> float:
        """PSNR of the worst frame."""
        return self.frame_psnr[self.worst_frame]

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON, with the worst frame."""
        return asdict(self) | {"worst_frame": self.worst_frame, "worst_psnr": self.worst_psnr}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Drift:
        """Return the drift of `as_dict` from JSON, where infinite and undefined numbers are
        strings."""

        def number(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(map(float, value))
            return None if value is None else float(value)

        return cls(**{field.name: number(values[field.name]) for field in fields(cls)})


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the SSIM of each frame: 11x11 Gaussian window, valid positions, mean over channels.

    Args:
        a: Frames [F, H, W, 3] with values in 0..1 and at least 11 pixels a side, any float dtype.
        b: The same.

    Returns:
        [F], fp64.
    """
    return torch.stack([_ssim_frame(x, y) for x, y in zip(a, b, strict=True)])


def relative_l2(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return |value - truth| / |truth| over all elements, computed in fp64."""
    truth64 = truth.double()
    return float((value.double() - truth64).norm() / truth64.norm())


def frame_drift(frames: torch.Tensor, truth: torch.Tensor) -> Drift:
    """Return the distances of frames [F, H, W, 3] in 0..1, except VMAF, which ffmpeg measures."""
    if frames.shape != truth.shape or min(frames.shape[1:3]) < SSIM_SIDE:
        raise ShapeError(
            "frames",
            expected=f"two videos of one shape, with at least {SSIM_SIDE} pixels a side",
            got=f"{tuple(frames.shape)} and {tuple(truth.shape)}",
        )
    of_frames = (frames.double() - truth.double()).square().flatten(1).mean(1)
    mse = float(of_frames.mean())
    return Drift(
        psnr=math.inf if mse == 0.0 else -10.0 * math.log10(mse),
        ssim=float(ssim(frames, truth).mean()),
        frame_psnr=tuple((-10.0 * torch.log10(of_frames)).tolist()),
    )


def _ssim_frame(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the SSIM of two frames [H, W, 3]. One at a time keeps large videos in memory."""
    window = torch.signal.windows.gaussian(
        SSIM_SIDE, std=SSIM_SIGMA, dtype=torch.float64, device=a.device
    )
    window = window / window.sum()
    x, y = (frame.double().permute(2, 0, 1).unsqueeze(1) for frame in (a, b))  # [3, 1, H, W]
    blurred = F.conv2d(torch.cat([x, y, x * x, y * y, x * y]), window.view(1, 1, -1, 1))
    blurred = F.conv2d(blurred, window.view(1, 1, 1, -1))
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = blurred.chunk(5)
    var_x, var_y = mean_xx - mean_x**2, mean_yy - mean_y**2
    covariance = mean_xy - mean_x * mean_y
    score = (2 * mean_x * mean_y + SSIM_C1) * (2 * covariance + SSIM_C2)
    score = score / ((mean_x**2 + mean_y**2 + SSIM_C1) * (var_x + var_y + SSIM_C2))
    return score.mean()


@dataclass(frozen=True, slots=True)
class NetworkNumber:
    """Mean errors of network calls against fp32 truth.

    Truth is the same network with its weights and inputs upcast to fp32, TF32 off, exact
    attention. Where an attention holds SLA's proj_l, unpatched and truth are SLA as it is defined.
    Errors are relative L2 of the output, averaged over the calls.

    Attributes:
        unpatched: Of the network as its authors wrote it.
        patched: Of the patched network, or with another attention backend.
    """

    unpatched: float
    patched: float

    @property
    def ratio(self) -> float:
        """e(patched) / e(unpatched); infinity where the latter is 0, as in fp32."""
        return self.patched / self.unpatched if self.unpatched else math.inf


class CapturedCalls:
    """Context manager that keeps up to `CALLS` calls of each network made in its `with` block,
    spread evenly over a run of unknown length.

    Every n-th call is kept, and n doubles when there are too many.

    Args:
        networks: The networks.

    Attributes:
        kept: Network -> the keyword arguments of its calls, their tensors copied to the CPU.
    """

    def __init__(self, networks: Iterable[torch.nn.Module]) -> None:
        self.kept: dict[torch.nn.Module, list[Call]] = {network: [] for network in networks}
        self._seen = dict.fromkeys(self.kept, 0)
        self._every = dict.fromkeys(self.kept, 1)
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for network in self.kept:
            hook = network.register_forward_pre_hook(self._keep, with_kwargs=True)
            self._hooks.enter_context(hook)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _keep(self, network: torch.nn.Module, args: Any, kwargs: Any) -> None:
        kept = self.kept[network]
        if self._seen[network] % self._every[network] == 0:
            names = inspect.signature(network.forward).parameters
            call = dict(zip(names, args, strict=False)) | kwargs
            copy = tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), call)
            kept.append(copy)
            if len(kept) > CALLS:
                del kept[1::2]
                self._every[network] *= 2
        self._seen[network] += 1


@torch.no_grad()
def network_number(
    calls: Mapping[torch.nn.Module, Sequence[Call]],
    config: PatchConfig | None = None,
    *,
    attention_backend: str | None = None,
    plans: Mapping[torch.nn.Module, Plan] = MappingProxyType({}),
    progress: OnStep = lambda done, total: None,
) -> NetworkNumber:
    """Measure the networks of a pipeline, which are unpatched before and after.

    Args:
        calls: A network in bf16, on any device, not offloaded -> the keyword arguments of each
            call, in a low precision, on any device. For the truth a network is upcast in place,
            one block at a time, so one of any size needs the memory of one block more.
        config: How to patch. The guard decides on the first call, as in a video.
        attention_backend: As for `compare`.
        plans: A network -> how its blocks run.
        progress: Called before and after each call of a network with (done, total).
    """
    config = config or PatchConfig()
    done, total = itertools.count(), 3 * sum(map(len, calls.values()))

    def outputs(network: torch.nn.Module, inputs: Sequence[Call]) -> list[torch.Tensor]:
        device, results = execution_device(network), []
        for call in inputs:
            progress(next(done), total)
            on_device = tree_map_only(torch.Tensor, lambda x: x.to(device), dict(call))
            results.append(network(**on_device | {"return_dict": False})[0].float().cpu())
        return results

    unpatched: list[float] = []
    patched: list[float] = []
    for network, inputs in calls.items():
        with sla_as_defined(network, config.sla_topk):
            plain = outputs(network, inputs)
        with judged(network, config, attention_backend, plans.get(network)):
            changed = outputs(network, inputs)
        with highest_precision(), sla_as_defined(network, config.sla_topk), upcast(network):
            truth = outputs(network, tree_map_only(torch.Tensor, _fp32, [*map(dict, inputs)]))
        unpatched += map(relative_l2, plain, truth)
        patched += map(relative_l2, changed, truth)
    progress(total, total)
    return NetworkNumber(fmean(unpatched), fmean(patched))


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@contextmanager
def upcast(network: torch.nn.Module) -> Iterator[None]:
    """Run a network in fp32 without a copy of it: a block is upcast while it runs, the tensors
    outside its blocks for the whole time. Every tensor is the one it was afterwards.

    The weight of a Linear with int8 alone is the product of int8 and scale, then not rounded.

    Args:
        network: With its blocks in lists (`ModuleList`), the way every video transformer has them.
    """
    lists = [child for child in network.children() if isinstance(child, torch.nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks]
    inside = {id(x) for block in blocks for x in _tensors(block)}
    held: dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def widen(part: torch.nn.Module, *_: object) -> None:
        tensors = [x for x in _tensors(part) if part is not network or id(x) not in inside]
        low = [x for x in tensors if x.is_floating_point() and x.dtype != torch.float32]
        if part not in held:
            held[part] = [(x, x.data) for x in low]
            for x in low:
                x.data = x.data.float()

    def narrow(part: torch.nn.Module, *_: object) -> None:
        for x, values in held.pop(part, []):
            x.data = values

    with ExitStack() as undo:
        for part in (network, *blocks):  # also a block that Ctrl-C met between its hooks
            undo.callback(narrow, part)
        widen(network)
        for module in network.modules():
            if type(module) is Int8Linear:
                undo.callback(setattr, module, "dtype", module.dtype)
                module.dtype = torch.float32
        for block in blocks:
            undo.callback(block.register_forward_pre_hook(widen).remove)
            undo.callback(block.register_forward_hook(narrow, always_call=True).remove)
        yield


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@contextmanager
def highest_precision() -> Iterator[None]:
    """Switch TF32 off for the length of a `with` block."""
    both: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    with ExitStack() as undo:
        for flags in both:
            undo.callback(setattr, flags, "allow_tf32", flags.allow_tf32)
            flags.allow_tf32 = False
        yield


@torch.no_grad()
def fusion_number(
    config: PatchConfig, device: torch.device, *, heads: int, head_dim: int
) -> float:
    """Return the relative L2 of fused against unfused `residual + gate * (attention @ W^T + b)`,
    for random fp32 numbers.

    Both are taken over the same quantised attention, so that its errors cancel, and the change by
    closing the skip inside the kernels is left.

    Args:
        config: How to patch.
        device: Where the kernels run.
        heads: Number of heads of the model.
        head_dim: Channels of a head of the model.
    """
    channels, tokens = heads * head_dim, 384
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v, residual = (draw(1, tokens, channels) for _ in range(4))
    weight = draw(channels, channels) / channels**0.5
    bias, gate = draw(channels), draw(1, 1, channels)
    spec = AttentionSpec(
        heads=heads,
        # So few tokens "auto" may run exactly.
        attention="int8" if config.attention == "auto" else config.attention,
        pv=config.pv,
        smooth_k=config.smooth_k,
        impl=config.impl,
    )
    with highest_precision():
        inputs = AttentionInputs(q, k, v, spec, q.dtype, skip=Skip(residual, 1.0, gate))
        fused = attend_and_project(inputs, weight, bias, form=config.form)
        attention = attention_skip(q, k, v, spec)
        unfused = residual + gate * (attention @ weight.T + bias)
    return relative_l2(fused, unfused)
