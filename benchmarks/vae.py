"""`vae`: decoding and encoding of a video by the VAEs of Wan and CogVideoX.

`s` is the faster of two calls after one to warm up, TF32 allowed, guard off. `GiB` is allocated
memory at the peak of a call, weights and result included.

Weights are random numbers that bf16 can represent. The error is taken against the same VAE in fp32
without TF32, over the first frames, because that one is slow.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from benchmarks import runner
from benchmarks.models import build_vae
from benchmarks.runner import ERROR, Benchmark, Column, Measure, Plan, Record
from turbo_rcm_patch import patched


class Case(NamedTuple):
    """A VAE, its input [B, C, T, H, W], and how many frames of it the error is taken over."""

    vae: str
    encodes: bool
    size: tuple[int, int, int, int, int]
    first: int


_CASES: Final = {
    "wan2.1-decode": Case("wan2.1", False, (1, 16, 21, 60, 104), 5),
    "wan2.1-encode": Case("wan2.1", True, (1, 3, 81, 480, 832), 9),
    "wan2.2-decode": Case("wan2.2-5b", False, (1, 48, 31, 44, 80), 3),
    "wan2.2-encode": Case("wan2.2-5b", True, (1, 3, 121, 704, 1280), 5),
    "cogvideox-decode": Case("cogvideox", False, (1, 16, 13, 60, 90), 5),
    "cogvideox-encode": Case("cogvideox", True, (1, 3, 49, 480, 720), 9),
}
#: Method -> dtype of the VAE, and the options of its patch or None without one.
_METHODS: Final[dict[str, tuple[torch.dtype, dict[str, Any] | None]]] = {
    "bf16": (torch.bfloat16, None),
    "bf16 patched": (torch.bfloat16, {"guard": False}),
    "fp32": (torch.float32, None),
    "fp32 patched": (torch.float32, {"guard": False}),
    "fp32 patched conv=bf16": (torch.float32, {"guard": False, "conv": "bf16"}),
}
#: Relative L2 from which a result is wrong; the unpatched VAEs in bf16 have up to 0.03.
_WRONG: Final = 0.1


def _prepare(name: str, plan: Plan, device: torch.device) -> Measure:
    case = _CASES[name]
    model = build_vae(case.vae, plan, device).to(torch.bfloat16).float()
    micro = (1, 3, 9, 32, 48) if case.encodes else (1, case.size[1], 5, 4, 6)
    size = micro if plan.micro else case.size
    x = torch.randn(*size, generator=runner.generator(device), device=device)

    def call(x: torch.Tensor) -> torch.Tensor:
        coded: Any = model.encode(x).latent_dist.parameters if case.encodes else None
        return torch.as_tensor(model.decode(x).sample if coded is None else coded)

    torch.backends.cudnn.allow_tf32 = False
    truth = call(x[:, :, : case.first])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def measure(method: str, record: Record) -> None:
        dtype, options = _METHODS[method]
        model.to(dtype)
        video = x.to(dtype)
        patch = nullcontext() if options is None else patched(model, **options)
        with patch:
            first = call(video[:, :, : case.first]).float()
            record["error"] = runner.checked_error(first, truth, _WRONG)
            runner.free(device)
            call(video)
            record["seconds"] = min(
                runner.seconds_of(partial(call, video), device) for _ in range(2)
            )
            record["peak_gib"] = runner.peak_gib(partial(call, video), device)

    return measure


vae: Final = Benchmark(
    name="vae",
    text="decoding and encoding a video by the VAEs of Wan and CogVideoX",
    columns=(Column("s", "seconds", ".3f"), Column("GiB", "peak_gib", ".2f"), ERROR),
    cases=dict.fromkeys(_CASES, list(_METHODS)),
    prepare=_prepare,
)
