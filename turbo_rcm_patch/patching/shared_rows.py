"""The rows of a video's frames, decoded in parts by several ranks.

Each rank holds its own rows of every frame, and `MARGIN` rows of each neighbour above and below
them. A convolution runs over both and pads with zeros, which is right at the outer border of the
frame, and spoils one row of each margin. So two convolutions run between two exchanges of margins,
all kernels run as they do on one rank, and each row is computed from the same numbers.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

#: Rows of each neighbour: a residual block is two convolutions.
MARGIN: Final = 2
#: Attribute of a VAE whose videos are shared, which holds its `Ranks`.
RANKS: Final = "_turbo_rcm_ranks"


class Ranks:
    """The ranks that share the videos of a VAE. A copy of the VAE, or one in another process, is
    not shared."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.count: int = 1 if group is None else dist.get_world_size(group)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()


class SharedRows:
    """Which rows of a frame this rank has. All tensors are [B, T, H, W, C].

    Args:
        ranks: Who shares the frame. Nobody does if there are too few rows.
        height: Rows of the frame at its lowest resolution.
    """

    def __init__(self, ranks: Ranks, height: int) -> None:
        count = ranks.count if height >= MARGIN * ranks.count else 1
        self.group, self.height = ranks.group, height
        self.sizes = [height // count + (i < height % count) for i in range(count)]
        self.rank = dist.get_rank(ranks.group) if count > 1 else 0
        self.above, self.below = self.rank > 0, self.rank < count - 1

    def whole_height(self, x: Tensor) -> int:
        """Return the rows of the frame of which x has a part."""
        return self.height * (self._own(x).shape[2] // self.sizes[self.rank])

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's rows of whole frames, with margins."""
        if len(self.sizes) == 1:
            return x
        scale = x.shape[2] // self.height
        start = scale * sum(self.sizes[: self.rank]) - MARGIN * self.above
        stop = scale * sum(self.sizes[: self.rank + 1]) + MARGIN * self.below
        return x[:, :, start:stop].contiguous()

    def _own(self, x: Tensor, margin: int = 0) -> Tensor:
        """Return a view of x with margins of so many rows."""
        cut = MARGIN - margin
        return x[:, :, cut * self.above : x.shape[2] - cut * self.below]

    def narrow(self, x: Tensor) -> Tensor:
        """Return a view of x with margins of half their size, for a pass that doubles the rows."""
        return x if len(self.sizes) == 1 else self._own(x, MARGIN // 2)

    def refresh(self, x: Tensor) -> None:
        """Write the neighbours' rows into the margins of x."""
        steps, came = [], []
        for there, step, sent, margin in (
            (self.above, -1, slice(MARGIN, 2 * MARGIN), slice(0, MARGIN)),
            (self.below, 1, slice(-2 * MARGIN, -MARGIN), slice(-MARGIN, None)),
        ):
            if there:
                peer = dist.get_global_rank(self.group, self.rank + step)
                rows = x[:, :, sent].contiguous()
                came.append((x[:, :, margin], torch.empty_like(rows)))
                steps.append(dist.P2POp(dist.isend, rows, peer, self.group))
                steps.append(dist.P2POp(dist.irecv, came[-1][1], peer, self.group))
        for work in dist.batch_isend_irecv(steps) if steps else ():
            work.wait()
        for place, rows in came:
            place.copy_(rows)

    def whole(self, x: Tensor) -> Tensor:
        """Return whole frames, on every rank."""
        if len(self.sizes) == 1:
            return x
        own = self._own(x)
        scale = own.shape[2] // self.sizes[self.rank]
        sent = own.new_empty(*own.shape[:2], scale * max(self.sizes), *own.shape[3:])
        sent[:, :, : own.shape[2]] = own
        parts = [torch.empty_like(sent) for _ in self.sizes]
        dist.all_gather(parts, sent, group=self.group)
        cut = zip(parts, self.sizes, strict=True)
        return torch.cat([one[:, :, : scale * size] for one, size in cut], 2)
