"""What is measured: shapes, the figures printed beside, and the aims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.setup import Shape

__all__ = [
    "AIMS",
    "NETWORKS",
    "NETWORK_AIMS",
    "NETWORK_REFERENCE",
    "REFERENCE",
    "REFERENCE_SOURCE",
    "AttentionCase",
    "attention_cases",
    "block_tokens",
    "name_of",
    "traffic_cases",
]

REFERENCE_SOURCE: Final = "measured earlier on the same kind of card, not in this run"
#: sageattention 2.2 (CUDA build) on an H200: 1e12 operations a second with smoothing and
#: quantisation included, and of the kernel alone. 2048 tokens: the middle of 211 to 237.
REFERENCE: Final[dict[str, dict[str, float]]] = {
    "H12-N32760-D128": {"all_in": 777.0, "kernel": 863.0},
    "H40-N75600-D128": {"all_in": 807.0},
    "H12-N8192-D128": {"all_in": 610.0, "kernel": 845.0},
    "H12-N4096-D128": {"all_in": 423.0},
    "H12-N2048-D128": {"all_in": 224.0, "kernel": 666.0},
    "H48-N17776-D64": {"all_in": 509.0, "kernel": 574.0},
}
#: Case -> (method to compare with, wanted ratio of speeds).
AIMS: Final[dict[str, tuple[str, float]]] = {
    "H12-N32760-D128": ("sageattention 2", 1.22),
    "H40-N75600-D128": ("sageattention 2", 1.18),
    "H12-N8192-D128": ("torch cuDNN", 1.37),
    "H12-N4096-D128": ("torch cuDNN", 1.20),
    "H12-N2048-D128": ("torch cuDNN", 1.26),
    "H48-N17776-D64": ("sageattention 2", 1.28),
}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """An attention of the comparison.

    Attributes:
        shape: B, N, H, D.
        peers: Whether every peer runs; else only ours and torch's cuDNN.
        graph: Whether it is short enough for launches to matter, so that a CUDA graph is timed.
        quick: Whether --quick measures it.
    """

    shape: Shape
    peers: bool = True
    graph: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """As in files and on the command line."""
        return name_of(self.shape)

    @property
    def operations(self) -> float:
        """4 N^2 D H B, both matrix products."""
        shape = self.shape
        return 4.0 * shape.batch * shape.q_tokens * shape.kv_tokens * shape.channels

    @property
    def intensity(self) -> float:
        """Operations a byte, when q, k, v are read once and the output is written once in 16
        bits."""
        tokens = 2 * self.shape.q_tokens + 2 * self.shape.kv_tokens
        return self.operations / (2.0 * self.shape.batch * tokens * self.shape.channels)


def name_of(shape: Shape) -> str:
    """H12-N4096-D128, with the batch in front unless it is 1."""
    name = f"H{shape.heads}-N{shape.q_tokens}-D{shape.head_dim}"
    return name if shape.batch == 1 else f"B{shape.batch}-{name}"


def _square(heads: int, tokens: int, head_dim: int, batch: int = 1) -> Shape:
    return Shape(batch, tokens, tokens, heads, head_dim)


def attention_cases(*, micro: bool) -> list[AttentionCase]:
    """All cases of `attention`, those with an aim first."""
    if micro:
        return [
            AttentionCase(_square(1, 40, 64), graph=True, quick=True),
            AttentionCase(_square(1, 50, 64), quick=True),
            AttentionCase(_square(1, 64, 64), peers=False),
        ]
    named = [
        AttentionCase(_square(12, 32760, 128), quick=True),
        AttentionCase(_square(40, 75600, 128)),
        AttentionCase(_square(12, 8192, 128), graph=True, quick=True),
        AttentionCase(_square(12, 4096, 128), graph=True, quick=True),
        AttentionCase(_square(12, 2048, 128), graph=True, quick=True),
        AttentionCase(_square(48, 17776, 64), quick=True),
    ]
    return [
        *named,
        AttentionCase(_square(12, 1024, 128), graph=True),
        AttentionCase(_square(12, 16384, 128)),
        *(AttentionCase(_square(12, n, 128), peers=False) for n in (65536, 131072, 160000)),
    ]


def block_tokens(*, micro: bool) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """(batch, channels, heads) and the numbers of tokens of the write-ups' own table."""
    return ((2, 128, 2), (48, 80)) if micro else ((4, 768, 12), (1024, 2048, 4096, 8192))


def traffic_cases(*, micro: bool) -> list[Shape]:
    """Attentions with a square output projection whose memory traffic is counted: the write-ups'
    table and a self-attention of Wan2.1-1.3B at 480p and 81 frames."""
    (batch, channels, heads), tokens = block_tokens(micro=micro)
    ours = [_square(heads, n, channels // heads, batch) for n in tokens]
    return ours if micro else [*ours, _square(12, 32760, 128)]


#: What differs from Wan2.1-T2V-1.3B, the network of `Sizes`; CogVideoX has a file of its own.
NETWORKS: Final[dict[str, dict[str, object]]] = {
    "1.3b": {},
    "14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "cogvideox-2b": {},
    "cogvideox-5b": {},
}
#: compile with sageattention 2.2 on an H200, ms of one forward at 480p and 81 frames (CogVideoX:
#: 49), there with a graph break per attention.
NETWORK_REFERENCE: Final = {
    "1.3b": 430.0, "14b": 2445.0, "cogvideox-2b": 231.0, "cogvideox-5b": 600.0,
}  # fmt: skip
#: Wanted ratio to it where one is set: with 16-bit linears, and with int8 linears.
NETWORK_AIMS: Final = {"1.3b": (1.26, 1.48), "14b": (1.14, 1.44)}
