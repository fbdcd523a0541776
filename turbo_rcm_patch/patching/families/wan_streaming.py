"""A Wan VAE's decoder or encoder called by itself, a few frames at a time (streaming).

Streaming code calls `vae.decoder(x, feat_cache=..., feat_idx=...)` for every latent frame, as
`AutoencoderKLWan._decode` of diffusers and `cached_decode` of Self-Forcing do. The list is the
caller's. Both paths put the same there, the last frames that each causal convolution read, so
either may run the next frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from turbo_rcm_patch.patching.plain import Replacement, compiling, original_forward
from turbo_rcm_patch.patching.vae import CoderSession, author_runs, kind_of

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.families.wan_coders import WanCoder

#: What the author caches for a resampling in time that only a video's first frame has passed.
_ZEROS: Final = "Rep"
_NAMES: Final = {"feat_cache", "feat_idx"}


class StreamedCoder(Replacement):
    """The function that replaces the forward of a decoder or an encoder.

    Args:
        coder: What replaces the VAE's function around it.
    """

    def __init__(self, coder: WanCoder) -> None:
        self.coder = coder

    def __call__(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        """Run the next frames of a video, [B, C, T, H, W]."""
        block = self.coder.block
        original = partial(original_forward(block), block, x, *args, **named)
        streams = not args and _NAMES <= named.keys() <= {*_NAMES, "first_chunk"}
        if compiling() or author_runs() or not streams or type(named["feat_cache"]) is not list:
            out: Tensor = original()
            return out
        return self._stream(original, x, **named)

    def _stream(
        self,
        original: partial[Tensor],
        x: Tensor,
        *,
        feat_cache: list[Any],
        feat_idx: list[int],
        first_chunk: bool = False,
    ) -> Tensor:
        """Run the next frames behind the author's cache, and renew it.

        Args:
            original: Runs the author's forward on the same arguments.
            x: [B, C, T, H, W].
            feat_cache: What the causal convolutions read last, in the order in which they run.
            feat_idx: The number of the first of them, and afterwards of what follows.
            first_chunk: True for a video's first frame (read by Wan 2.2's shortcuts alone).
        """
        coder = self.coder
        convs: list[Any] = [
            module
            for name, module in coder.block.named_modules()
            if kind_of(module) == "CausalConv3d" and not name.endswith("shortcut")
        ]
        part = slice(feat_idx[0], feat_idx[0] + len(convs))
        cached = feat_cache[part]
        fresh = all(frames is None for frames in cached)
        why = coder.why_original(x) or self._why_call(x, cached, convs, fresh, first_chunk)
        coder.last = why or (0, 0)
        if why:
            return original()
        if fresh:
            coder.compile_ahead(x, partial(self._run_two_chunks, x))
        session, key = CoderSession(coder, x), (x.dtype, x.device.type, fresh)
        for conv, frames in zip([] if fresh else convs, cached, strict=False):
            session.history[conv] = _history(conv, frames, session)
        theirs = [*feat_cache]
        run = partial(original, feat_cache=theirs, feat_idx=[*feat_idx])
        expected = coder.expected(key, run) if coder.due(key) else None
        coder.ran = Counter()
        out = coder.run_frames(session, x)
        if expected is None or coder.fits(out, expected, x):
            feat_cache[part] = [_cached(session.history[conv]) for conv in convs]
        else:
            feat_cache[:], out = theirs, expected
        feat_idx[0] += len(convs)
        return out

    def _run_two_chunks(self, x: Tensor) -> None:
        """Run a video of one frame five times: a second chunk launches kernels of its own."""
        self.coder.run_frames(CoderSession(self.coder, x), torch.cat([x] * 5, 2))

    def _why_call(
        self,
        x: Tensor,
        cached: Sequence[Any],
        convs: Sequence[Any],
        fresh: bool,
        first_chunk: bool,
    ) -> str:
        """Return why the fast path cannot run the next frames behind a cache, or ""."""
        known = fresh or all(isinstance(held, Tensor) or held == _ZEROS for held in cached)
        if len(cached) != len(convs) or not known:
            return "feat_cache is not what the author's code writes"
        times = 2 ** sum(conv.stride[0] == 2 for conv in convs)
        if x.shape[2] != 1 if fresh else x.shape[2] % times:
            return f"{x.shape[2]} frames at once"
        skips = self.coder.part == "decoder" and self.coder.resolutions()[0].shortcut
        if skips and first_chunk != fresh:
            return f"first_chunk is {first_chunk}"
        shared = self.coder.decode_group().size > 1
        return "the ranks of a group run whole videos together" if shared else ""


def _history(conv: Any, frames: Any, session: CoderSession) -> Tensor | None:
    """Return what a session holds for the author's cached frames [B, C, T, H, W]. The author
    leaves out zeros before a video."""
    if not isinstance(frames, Tensor):
        return None
    length = 1 if conv.stride[0] == 2 else conv.kernel_size[0] - 1
    history = frames.movedim(1, -1).to(session.device, session.dtype)
    missing = length - history.shape[1]  # negative where the author kept more than are read
    return F.pad(history, (0, 0, 0, 0, 0, 0, missing, 0)).contiguous()


def _cached(history: Tensor | None) -> Any:
    """Return what the author caches for a session's frames [B, T, H, W, C]."""
    return _ZEROS if history is None else history.movedim(-1, 1)
