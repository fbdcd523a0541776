"""A patched VAE: its decoder and its encoder run channels-last from the first convolution to the
last.

A family subclasses `PatchedCoder` once for the decoder and once for the encoder. It replaces the
VAE's `_decode` or `_encode`, and decides once for a whole video.

- One pass norms, applies SiLU and writes behind the frames of history that the next causal
  convolution needs. Biases and residuals are added where the result is read next (`ops/conv3d`).
- Tiles and batches of frames are the author's own loops, run over a shallow copy of the VAE whose
  coder is the fast path.
- Weights are packed for one video and dropped with it. All state belongs to the call.
- On the first video the author's code decodes two latent frames or encodes five frames. Over the
  budget the author's code runs from that video on.
- A compiled coder runs the fast path too. Group offloading, hooks inside, a compiled `decode` or
  `encode`, gradients, autocast and mixed dtypes are left to the author's code.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import NotPatchedError
from turbo_rcm_patch.ops.conv3d.api import conv3d, pack_phases, pack_weight
from turbo_rcm_patch.ops.conv3d.formats import Duplicate, GroupNorm, RMSNorm
from turbo_rcm_patch.ops.conv3d.passes import norm_silu, upsample
from turbo_rcm_patch.patching.block import LEVEL_DESCRIPTIONS, Level, PatchedBlock
from turbo_rcm_patch.patching.guard_log import GuardRecord
from turbo_rcm_patch.patching.halo_exchange import DECODE_GROUP, DecodeGroup, HaloExchange
from turbo_rcm_patch.patching.measure import BUDGET, ROW_ROOM
from turbo_rcm_patch.patching.plain import (
    FLOATS,
    compiling,
    drops,
    hook_names,
    hooked,
    original_class,
    own_function,
    replaced_by,
    runs_only_its_forward,
    torchs_own,
)
from turbo_rcm_patch.skip import Residual, SkipPair, Stream

_log = logging.getLogger(__name__)

#: Least root mean square of a frame or a line that an error is relative to, for values in -1..1.
_LEAST_SIZE: Final = 0.05
#: Functions of `torch.nn.functional` that the original modules call and the fast path replaces.
_TORCH_FUNCTIONS: Final = (
    *("avg_pool1d", "conv2d", "conv3d", "dropout", "group_norm", "interpolate", "normalize"),
    *("pad", "silu"),
)
#: True while an author's `_decode` or `_encode` runs.
_author_runs: Final = ContextVar("_author_runs", default=False)
#: Methods that the forwards of the original modules call.
_METHODS: Final = ("_conv_forward", "fake_context_parallel_forward")


class CoderSession:
    """The state of a coder over one video: packed weights, and frames of history.

    It lives as long as the call, so no weight is read twice with different values, and two threads
    share nothing.

    Args:
        coder: The coder.
        x: The video or the latent, [B, C, T, H, W].

    Attributes:
        dtype: dtype of the products.
        stream: dtype of the residual stream.
        device: Where it runs.
        impl: As `PatchConfig.impl`.
        halo: The rows of a frame that this rank decodes.
        history: Convolution -> the last frames that it read, for its next call; None for zeros.
            A convolution that is missing has not run.
    """

    def __init__(self, coder: PatchedCoder, x: Tensor) -> None:
        half = coder.config.conv == "bf16" and x.dtype == torch.float32
        self.dtype, self.stream = torch.bfloat16 if half else x.dtype, x.dtype
        self.device, self.impl = x.device, coder.config.impl
        self.halo = HaloExchange(coder.decode_group(), x.shape[3])
        self.history: dict[nn.Module, Any] = {}
        self._coder = coder
        self._packed: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    def weights(self, conv: Any, phases: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the packed weight (`phases`: that of `pack_phases`) and the bias."""
        if conv not in self._packed:
            weight, bias = self._coder.read(self, conv)
            self._packed[conv] = pack_phases(weight) if phases else weight, bias
        return self._packed[conv]

    def with_history(
        self,
        conv: Any,
        x: Tensor,
        norm: RMSNorm | GroupNorm | None = None,
        *,
        before: Tensor | None = None,
    ) -> Tensor:
        """Return silu(norm(x + before)) behind the frames that a causal convolution read last.

        Args:
            conv: The convolution, [kT, kH, kW].
            x: [B, T, H, W, C].
            norm: Its norm, or None for neither norm nor SiLU.
            before: [C], added to x first, or None.

        Returns:
            [B, kT - 1 + T, H, W, C] in the dtype of the products.
        """
        frames, first = conv.kernel_size[0] - 1, conv not in self.history
        y, self.history[conv] = norm_silu(
            x,
            norm,
            silu=norm is not None,
            before=before,
            frames=frames,
            history=self.history.get(conv),
            dtype=self.dtype,
            impl=self.impl,
        )
        if first and frames and self._coder.repeats_first:
            y[:, :frames] = y[:, frames : frames + 1]
            self.history[conv] = y[:, -frames:].clone()
        return y

    def conv(
        self,
        conv: Any,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        with_bias: bool = True,
        dtype: torch.dtype | None = None,
        phases: bool = False,
    ) -> Tensor:
        """Run a convolution of the model on x [B, T + history, H, W, C].

        Args:
            conv: The module. Without a stride, zeros around a frame keep its size.
            x: Its input, in the dtype of the products.
            residual: Added to the result, or None.
            with_bias: False leaves the bias to the next pass.
            dtype: dtype of the result; by default that of the stream, or of the products without
                the bias.
            phases: Use the weight of `pack_phases`.
        """
        weight, bias = self.weights(conv, phases)
        stride = (1, *conv.stride)[-3:]
        same_size = weight.shape[2] // 2, weight.shape[3] // 2
        return conv3d(
            x,
            weight,
            bias if with_bias else None,
            residual=residual,
            stride=stride,
            padding=same_size if stride[1:] == (1, 1) else (0, 0),
            dtype=dtype or (self.stream if with_bias else self.dtype),
            impl=self.impl,
            counts=self._coder.ran,
        )

    def residual_block(
        self, x: Tensor, norms: Sequence[Any], convs: Sequence[Any], shortcut: Any = None
    ) -> Tensor:
        """Run a residual block on x [B, T, H, W, C].

        Args:
            x: Its input.
            norms: Its two norms.
            convs: Its two convolutions.
            shortcut: The convolution around them, or None.
        """
        h = x if shortcut is None else self.conv(shortcut, x.to(self.dtype))
        y = self.with_history(convs[0], x, norms[0])
        y = self.conv(convs[0], y, with_bias=False)  # the next pass adds the bias
        _, bias = self.weights(convs[0])
        y = self.with_history(convs[1], y, norms[1], before=bias)
        return self.conv(convs[1], y, residual=h)

    def upsample(
        self, conv: Any, x: Tensor, duplicate: Duplicate | None = None, **repeat: Any
    ) -> Tensor:
        """Double the size of x [B, T, H, W, C] (nearest), and run a 3 x 3 convolution over that.

        Args:
            conv: The module.
            x: Its input before upsampling.
            duplicate: As in `passes.upsample`.
            **repeat: `repeat` and `first` of `passes.upsample`.
        """
        x = x.to(self.dtype).contiguous()
        y = self.conv(conv, x, with_bias=False, phases=True)
        _, bias = self.weights(conv)
        return upsample(y, bias, duplicate, dtype=self.stream, impl=self.impl, **repeat)


class PatchedCoder(PatchedBlock):
    """The function that replaces `_decode` or `_encode` of a VAE.

    Args:
        vae: The VAE.
        path: Its name in what the user passed.
        config: How it is patched.
    """

    #: Name of the coder in the VAE, and of the VAE's function that runs it over a video.
    part: ClassVar[str]
    caller: ClassVar[str]
    #: Name of an author's class inside -> the first parameters of its forward.
    forwards: ClassVar[Mapping[str, tuple[str, ...]]]
    #: Kind of a module -> the kinds of the modules in it, as a regular expression (`kinds_in`).
    layers: ClassVar[Mapping[str, str]]
    #: Kind of a module -> its attributes and the values that the fast path knows.
    settings: ClassVar[Mapping[str, Mapping[str, tuple[Any, ...]]]]
    #: End of a convolution's name -> the only kernel size and stride that the fast path knows
    #: there. Other convolutions have any kernel size, and no stride.
    resampling: ClassVar[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]]
    #: Parts of the channels of the result that the guard compares by themselves.
    halves: ClassVar[int] = 1
    #: Whether copies of the first frame come before it, instead of zeros.
    repeats_first: ClassVar[bool] = False
    #: Whether several ranks can run it in parts with the same bits.
    shared: ClassVar[bool] = False

    def __init__(self, vae: Any, path: str, config: PatchConfig) -> None:
        name = f"{path}.{self.part}".strip(".")
        super().__init__(uncompiled(getattr(vae, self.part)), name, config, 1, 0)
        self.vae, self.vae_class = vae, original_class(vae)
        self.compared = dict[Any, int]()
        self.ran: Counter[str] = Counter()
        self.logged = ""

    # --- a call ----------------------------------------------------------------------------------

    def place(self) -> tuple[Any, str]:
        return self.vae, self.caller

    def group(self) -> Any:
        return self.decode_group().group

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the coder over a whole video, and log how it ran where that has changed."""
        if compiling():
            self.last = f"{self.caller} is compiled"
            return self.run_original(self.vae, x, *args, **kwargs)
        ranks = self.decode_group()
        with ranks.lock:
            key = x.dtype, x.device.type
            why, compares = ranks.agree(self, x, self.why_original(x), self.due(key))
            self.last = why or (0, 0)
            if why:
                out = self.run_original(self.vae, x, *args, **kwargs)
            else:
                self.compile_ahead(x, partial(self.run_start, x, *args, **kwargs))
                start = x[:, :, : self.first_frames(x)]
                run = partial(self.run_original, self.twin(), start, *args, **kwargs)
                expected = self.expected(key, run) if compares else None
                self.ran = Counter()
                out = self.run_video(x, *args, **kwargs)
                fits = expected is None or self.fits(_tensor(out), expected, x)
                if compares and not ranks.all_agree(fits, x):
                    out = self.run_original(self.vae, x, *args, **kwargs)
        if (how := self.describe_last_run()) != self.logged:
            self.logged = how
            _log.info("%s: %s", self.path, how)
        return out

    def run_video(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the fast path over a whole video, tiled and sliced as the VAE says.

        Returns:
            What the author's function returns.
        """
        raise NotImplementedError

    def run_start(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the fast path over few frames. With three more than the guard compares, a decoder
        begins a second chunk, and so launches all kernels of a video."""
        frames = self.first_frames(x) + 3 * (self.part == "decoder")
        self.run_video(x[:, :, :frames], *args, **kwargs)

    def run_original(self, vae: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the author's `_decode` or `_encode`."""
        original = getattr(original_class(self.vae), self.caller)
        if compiling():
            return original(vae, x, *args, **kwargs)
        before = _author_runs.set(True)
        try:
            return original(vae, x, *args, **kwargs)
        finally:
            _author_runs.reset(before)

    def read(self, session: CoderSession, conv: Any) -> tuple[Tensor, Tensor | None]:
        """Return the packed weight of a convolution, and its bias."""
        return pack_weight(conv.weight, session.dtype), conv.bias

    def twin(self, coder: Any = None) -> Any:
        """Return a shallow copy of the VAE, whose functions may write attributes without changing
        the VAE.

        Args:
            coder: What its functions call as the coder; by default the coder itself.
        """
        twin: Any = object.__new__(type(self.vae))
        vars(twin).update(vars(self.vae))
        vars(twin).pop(self.caller, None)
        if coder is not None:
            vars(twin)[self.part] = coder
        return twin

    def first_frames(self, x: Tensor) -> int:
        """Return the number of frames of x that the guard's comparison takes."""
        raise NotImplementedError

    def decode_group(self) -> DecodeGroup:
        """Return the ranks that run the coder together."""
        group: DecodeGroup | None = vars(self.vae).get(DECODE_GROUP) if self.shared else None
        return group or DecodeGroup()

    # --- which path ------------------------------------------------------------------------------

    def why_original(self, *inputs: Any) -> str:
        weights = self.vae.parameters() if torch.is_grad_enabled() else ()
        return super().why_original(*inputs, *weights)  # those around it may want a gradient

    def why_modules(self) -> str:
        if uncompiled(getattr(self.vae, self.part)) is not self.block:
            return f"the {self.part} was replaced"
        if original_class(self.vae) is not self.vae_class:
            return "the class of the VAE was replaced"
        if not own_function(self.vae_class, self.caller):
            return f"{self.caller} of its class was replaced"
        for name in _TORCH_FUNCTIONS:
            if not torchs_own(getattr(F, name), name):
                return f"torch.nn.functional.{name} was replaced"
        classes: set[type[nn.Module]] = set()  # torch 2.11 cannot trace `set[...]()`
        modules: list[tuple[str, nn.Module]] = [(self.part, self.block)]
        for name, module in modules:  # `named_modules` would take longer than all checks
            cls = original_class(module)
            if cls not in classes and not self.knows(cls):
                return f"{name} is a {cls.__name__}, which is not supported"
            classes.add(cls)
            # A list is never called, so its forward is torch's for "not implemented".
            if cls is not nn.ModuleList and not self.runs_only_its_forward(module):
                return f"{name} has {hook_names(module)}"
            why = "dropout is on" if drops(module) else self.why_module(name, module)
            if why:
                return f"{name}: {why}"
            if not vars(module).keys().isdisjoint(_METHODS):
                return f"{name}: a method was replaced"
            children = module._modules.items()
            modules += [(f"{name}.{key}", child) for key, child in children if child is not None]
        return replaced_method(classes)

    def runs_only_its_forward(self, module: nn.Module) -> bool:
        """Return True if calling a module inside runs its class's forward, or what replaces that
        of the coder, and no other code."""
        streamed = module is self.block and replaced_by(module) is not None
        if streamed and not hooked(module):
            return own_function(original_class(module), "forward")
        return runs_only_its_forward(module)

    def knows(self, cls: type[nn.Module]) -> bool:
        """Return True if a class of modules inside is one of torch's, or one of the file in which
        the VAE was written. `layers` says where which may be."""
        name, file = cls.__name__, sys.modules[self.vae_class.__module__]
        return getattr(nn, name, None) is cls or getattr(file, name, None) is cls

    def why_module(self, name: str, module: Any) -> str:
        """Return why the layers and settings of a module inside are not those that the fast path
        knows, or ""."""
        kind = kind_of(module)
        layers = self.layers.get(kind)
        if layers and not re.fullmatch(layers, kinds_in(module)):
            return "its layers are not the author's"
        for setting, values in self.settings.get(kind, {}).items():
            if getattr(module, setting) not in values:
                return f"its {setting} is not the author's"
        if not isinstance(module, (nn.Conv2d, nn.Conv3d)):
            return ""
        shape = tuple(module.weight.shape[2:])
        ones = (1,) * len(shape)
        resampling = [known for end, known in self.resampling.items() if name.endswith(end)]
        taps, strides = resampling[0] if resampling else (shape, ones)
        height, width = (size // 2 for size in taps[-2:]) if strides == ones else (0, 0)
        causal = "_padding" in vars(module) and module.stride[0] == 1
        known = (
            module.kernel_size == taps == shape
            and module.stride == strides
            and zeros_around(module) == (taps[0] - 1 if causal else 0, height, width)
            and module.dilation == ones
            and module.groups == 1
            and module.padding_mode == "zeros"
        )
        return "" if known else "its stride, padding, groups or dilation are not the author's"

    def casts_weights(self) -> bool:
        """Return True if weights may be anywhere, because the coder's modules cast them."""
        return False

    def why_inputs(self, x: Tensor, *_: Any) -> str:
        cast = self.casts_weights()
        for name, weight in self.block.named_parameters():
            if type(weight) is not nn.Parameter or weight.dtype not in FLOATS:
                return f"{name} is a {type(weight).__name__} in {weight.dtype}"
            if not cast and (weight.dtype, weight.device) != (x.dtype, x.device):
                place = f"{weight.dtype} on {weight.device}"
                return f"the input is {x.dtype} on {x.device}, {name} is {place}"
        return "" if x.dim() == 5 and x.numel() else "the input is not [B, C, T, H, W]"

    # --- the guard -------------------------------------------------------------------------------

    def due(self, key: Any) -> bool:
        """Return True if the guard has to compare calls of a kind."""
        return self.guard is not None and self.compared.get(key) != self.guard.requests

    @torch.no_grad()
    def expected(self, key: Any, original: Callable[[], Any]) -> Tensor | None:
        """Return the author's result, to compare with; None if the author's code fails.

        Args:
            key: The kind of the call.
            original: Runs the author's code.
        """
        self.compared[key] = self.guard.requests
        try:
            return _tensor(original())
        except Exception as error:  # Its memory may not suffice.
            reason = f"the original code failed: {type(error).__name__}: {error}"
            self._add(float("nan"), "not compared", reason)
            return None

    @torch.no_grad()
    def fits(self, out: Tensor, expected: Tensor, x: Tensor) -> bool:
        """Compare a result with the author's first frames. Return False if it is not to be used;
        the author's code runs from then on, unless the input is to blame."""
        error, where = distance(out[:, :, : expected.shape[2]], expected, self.halves)
        verdict = "kept"
        if error > BUDGET and not bool(x.isfinite().all()):
            verdict, where = "not compared", "the input holds NaN or infinity"
            self.compared.clear()  # The next video is compared.
        elif error > BUDGET:
            self.raise_level(Level.ORIGINAL, f"{error:.3g} off in {where}, budget {BUDGET:g}")
            verdict, where = LEVEL_DESCRIPTIONS[Level.ORIGINAL], self.reason
        self._add(error, verdict, where)
        if verdict != "kept":
            self.last = where
        return verdict == "kept"

    def _add(self, error: float, verdict: str, where: str) -> None:
        assert self.guard is not None
        self.guard.log.add(GuardRecord(self.path, None, "first", error, BUDGET, verdict, where))
        if verdict != "kept":
            _log.warning("%s: %s: %s", self.path, verdict, where)

    # --- for the report --------------------------------------------------------------------------

    def linears(self) -> dict[str, Any]:
        return {}

    def describe_last_run(self) -> str:
        if not isinstance(self.last, tuple):
            return super().describe_last_run()
        ran = ", ".join(f"{count} by {name}" for name, count in sorted(self.ran.items()))
        count = self.decode_group().size
        shared = f"rows over {count} ranks, " if count > 1 else ""
        return f"channels-last, {shared}convolutions: {ran}"

    def pairs(self) -> list[SkipPair]:
        why = self.left or self.why_modules()
        reasons = [why or LEVEL_DESCRIPTIONS.get(self.level, ""), self.reason]
        left = bool(why) or self.level == Level.ORIGINAL
        how: dict[str, Residual] = {"convolution": "in-kernel", "self": "two-launch"}
        return [
            SkipPair(
                path=f"{self.path}.{name}",
                kind=kind,
                heads=int(kind == "self"),
                head_dim=int(getattr(module, "dim", 0)) if kind == "self" else 0,
                streams=(Stream("video", "1", "1"),),
                cast="model",
                projection=kind == "self",
                runs="as-written" if left else how[kind],
                reason="; ".join(filter(None, reasons)),
            )
            for name, module in self.block.named_modules()
            if (kind := closes(module)) is not None
        ]


def share(vae: nn.Module, group: Any) -> bool:
    """Let the ranks of a process group decode each video of a patched VAE together, by rows.

    Each rank calls `vae.decode` with the same latent, as without this, and gets the whole video.
    All ranks of the group have to call it. The encoder runs on each rank alone, and so does
    CogVideoX's decoder, whose group norms sum over whole frames in another order.

    Args:
        vae: The patched VAE itself.
        group: The process group; None ends the sharing.

    Returns:
        True if its decoder is shared.

    Raises:
        NotPatchedError: The VAE is not patched.
    """
    # `record.ATTRIBUTE`: importing it here would be a circle.
    record: Any = vars(vae).get("_turbo_rcm_patch")
    if record is None:
        raise NotPatchedError(
            "share: vae",
            expected="a patched VAE",
            got=f"a {type(vae).__name__} that is not patched",
            remedy="Call patch_model on it, or on its pipeline, first",
        )
    vars(vae).pop(DECODE_GROUP, None)
    if group is not None:
        vars(vae)[DECODE_GROUP] = DecodeGroup(group)
    return any(isinstance(block, PatchedCoder) and block.shared for block in record.blocks)


def author_runs() -> bool:
    """Return True inside of an author's `_decode` or `_encode`."""
    return _author_runs.get()


def uncompiled(module: Any) -> Any:
    """Return the module inside of a compiled one that has no hooks of its own."""
    compiled = type(module).__name__ == "OptimizedModule" and not hooked(module)
    return module._orig_mod if compiled else module


def kind_of(module: Any) -> str:
    """Return the name of a module's class, without the prefix that diffusers gives it."""
    return original_class(module).__name__.removeprefix("Wan").removeprefix("CogVideoX")


def closes(module: nn.Module) -> Literal["self", "convolution"] | None:
    """Return the kind of the skip pair that a module of a coder is, if it is one."""
    kind = kind_of(module)
    if kind == "AttentionBlock":
        return "self"
    adds = kind in ("ResidualBlock", "ResnetBlock3D") or getattr(module, "avg_shortcut", None)
    return "convolution" if adds else None


def kinds_in(module: nn.Module) -> str:
    """Return the kinds of the modules in a module, in the order in which it was given them; for a
    list the kinds of its elements."""
    listed = (
        child.children() if isinstance(child, (nn.ModuleList, nn.Sequential)) else [child]
        for child in module._modules.values()
    )
    return " ".join(map(kind_of, chain.from_iterable(listed)))


def zeros_around(conv: Any) -> tuple[int, int, int] | None:
    """Return the frames of zeros that a convolution puts before a video, the rows that it puts
    above and below a frame, and the columns left and right; None for any other padding."""
    if type(conv.padding) is not tuple:
        return None
    time, height, width = (0, *conv.padding)[-3:]
    causal = vars(conv).get("_padding", 0)  # of Wan's convolutions: in time, or on all six sides
    if isinstance(causal, int):
        causal = (0, 0, 0, 0, causal, 0)
    left, right, above, below, before, after = causal
    if time or after or left != right or above != below:
        return None
    return before, height + above, width + left


def replaced_method(classes: set[type[nn.Module]]) -> str:
    """Name a method that other code replaced in one of the classes or in a base of it, among those
    that a call runs, or return ""."""
    for cls in classes:
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            for name in ("forward", *_METHODS):
                if name in vars(base) and not own_function(base, name):
                    return f"{name} of {base.__name__} was replaced"
    return ""


def _tensor(out: Any) -> Tensor:
    tensor: Tensor = out if isinstance(out, Tensor) else out[0]
    return tensor


def distance(fast: Tensor, author: Tensor, halves: int = 1) -> tuple[float, str]:
    """Return the largest relative error of a frame, a row or a column, scaled so that `BUDGET` is
    the limit of each, and where it is.

    Args:
        fast: [B, C, T, H, W].
        author: The same of the author's code.
        halves: Parts of the channels that are compared by themselves.
    """
    size = torch.unflatten(author.float(), 1, (halves, -1)).square()
    off = torch.unflatten(fast.float() - author.float(), 1, (halves, -1)).square()
    frame_size = size.mean((2, 4, 5), keepdim=True)
    worst = []
    for dims, room in (((2, 4, 5), 1.0), ((2, 5), ROW_ROOM), ((2, 4), ROW_ROOM)):
        scale = torch.maximum(size.mean(dims), frame_size.mean(dims)).clamp_min(_LEAST_SIZE**2)
        error = (off.mean(dims) / scale).sqrt() / room
        worst.append(torch.nan_to_num(error, nan=torch.inf).amax())
    errors: list[float] = torch.stack(worst).tolist()
    where = "a frame", "a row of pixels", "a column of pixels"
    return max(zip(errors, where, strict=True), key=lambda pair: pair[0])
