"""Halo exchange: several ranks decode a video together, each some rows of pixels of every frame.

Each rank holds its own rows, and `HALO` rows of each neighbour above and below them. A convolution
runs over both and pads with zeros, which is right at the outer border of the frame, and spoils one
row of each halo. So two convolutions run between two exchanges, all kernels run as they do on one
rank, and each pixel is computed from the same numbers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from turbo_rcm_patch.patching.agreement import agree, gather_objects, sample

if TYPE_CHECKING:
    from turbo_rcm_patch.patching.vae import PatchedCoder

#: Rows of each neighbour: a residual block is two convolutions.
HALO: Final = 2
#: Attribute of a VAE that several ranks run together, which holds its `DecodeGroup`.
DECODE_GROUP: Final = "_turbo_rcm_decode_group"


class DecodeGroup:
    """The process group that decodes the videos of a VAE. A copy of the VAE, or one in another
    process, has none.

    Attributes:
        group: The process group; None for this process alone.
        size: The number of its ranks.
        lock: Held while a video is decoded: ranks exchange for one video at a time.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeGroup, ()

    def agree(self, coder: PatchedCoder, x: Tensor, why: str, compares: bool) -> tuple[str, bool]:
        """Decide on all ranks alike how a latent is decoded.

        Args:
            coder: The decoder.
            x: The latent, [B, C, T, H, W].
            why: Why this rank would run the author's code, or "".
            compares: True if its guard would compare the result.

        Returns:
            Why all ranks run the author's code, or "", and True if the guard of any compares.

        Raises:
            ContextParallelError: The ranks have different latents, weights or settings.
        """
        if self.size == 1:
            return why, compares
        vae = coder.vae
        sizes = {name: x for name, x in vars(vae).items() if name.startswith(("tile_", "use_"))}
        weights = [item for item in vae.named_parameters() if not item[0].startswith("encoder.")]
        values = {
            "the latent": x,
            "the patch of the VAE": repr(coder.config),
            "the tiling of the VAE": sizes,
            "the weights of the decoder": sample(weights, x.device),
        }
        agree(self.group, f"a call of {coder.path}", values, x.device)
        answers = gather_objects(self.group, (why, compares), x.device)
        reasons = [f"{other} (on rank {rank})" for rank, (other, _) in enumerate(answers) if other]
        return why or next(iter(reasons), ""), any(compares for _, compares in answers)

    def all_agree(self, fits: bool, x: Tensor) -> bool:
        """Return True if a result fits on all ranks."""
        return fits if self.size == 1 else all(gather_objects(self.group, fits, x.device))


class HaloExchange:
    """The rows of pixels that this rank has of each frame. All tensors are [B, T, H, W, C].

    Args:
        ranks: The group that splits the frames. Frames with too few rows are not split.
        height: Rows of a frame at its lowest resolution.
    """

    def __init__(self, ranks: DecodeGroup, height: int) -> None:
        count = ranks.size if height >= HALO * ranks.size else 1
        self._group, self._height = ranks.group, height
        self._heights = [height // count + (rank < height % count) for rank in range(count)]
        self._rank = dist.get_rank(ranks.group) if count > 1 else 0
        self._has_above, self._has_below = self._rank > 0, self._rank < count - 1

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of whole frames, with halos."""
        if len(self._heights) == 1:
            return x
        scale = x.shape[2] // self._height
        start = scale * sum(self._heights[: self._rank]) - HALO * self._has_above
        stop = scale * sum(self._heights[: self._rank + 1]) + HALO * self._has_below
        return x[:, :, start:stop].contiguous()

    def exchange_halo(self, x: Tensor) -> Tensor:
        """Write the neighbours' rows into the halos of x, and return x."""
        steps, received = [], []
        for exists, step, border, halo in (
            (self._has_above, -1, slice(HALO, 2 * HALO), slice(0, HALO)),
            (self._has_below, 1, slice(-2 * HALO, -HALO), slice(-HALO, None)),
        ):
            if exists:
                peer = dist.get_global_rank(self._group, self._rank + step)
                sent = x[:, :, border].contiguous()
                buffer = torch.empty_like(sent)
                received.append((x[:, :, halo], buffer))
                steps.append(dist.P2POp(dist.isend, sent, peer, self._group))
                steps.append(dist.P2POp(dist.irecv, buffer, peer, self._group))
        for work in dist.batch_isend_irecv(steps) if steps else ():
            work.wait()
        for halo_rows, buffer in received:
            halo_rows.copy_(buffer)
        return x

    def shrink_halo(self, x: Tensor) -> Tensor:
        """Return a view of x with halos of half their size, which upsampling doubles again."""
        return self._without(HALO // 2, x)

    def gather(self, x: Tensor) -> Tensor:
        """Return whole frames, on every rank."""
        if len(self._heights) == 1:
            return x
        rows = self._without(HALO, x)
        scale = rows.shape[2] // self._heights[self._rank]
        sent = rows.new_empty(*rows.shape[:2], scale * max(self._heights), *rows.shape[3:])
        sent[:, :, : rows.shape[2]] = rows
        parts = [torch.empty_like(sent) for _ in self._heights]
        dist.all_gather(parts, sent, group=self._group)
        sizes = zip(parts, self._heights, strict=True)
        return torch.cat([part[:, :, : scale * height] for part, height in sizes], 2)

    def _without(self, rows: int, x: Tensor) -> Tensor:
        """Return a view of x without so many outer rows of each halo."""
        return x[:, :, rows * self._has_above : x.shape[2] - rows * self._has_below]
