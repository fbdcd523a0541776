"""`precompile` fills Triton's cache without a GPU, says what it did, and leaves no trace.

tests/gpu/test_precompile_gpu.py runs a model from such a cache.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.launches import needs_hopper_kernels
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.__main__ import main
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.ops.dispatch import on_gpu, resolve_impl
from turbo_rcm_patch.video import precompile
from turbo_rcm_patch.video.environment import code_digest

#: Norms and skips of the network, and the passes of the VAE: kernels that compile in seconds.
_FEW = ["--model", "tiny", "--gpu", "sm_80", "--attention", "exact", "--dtype", "float32"]


def test_a_second_run_finds_what_the_first_one_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_hopper_kernels()
    command = ["precompile", *_FEW, "--out", str(tmp_path / "cache")]
    assert main(command) == 0
    first = capsys.readouterr().out.split()
    assert main(command) == 0
    second = capsys.readouterr().out.split()
    assert int(first[0]) > 10 and first[3] == "0"
    assert second[0] == "0" and second[3] == first[0]

    # Nothing of the GPU that was stood for is left.
    meta = torch.device("meta")
    assert not on_gpu(meta) and resolve_impl("auto", meta) == "reference"

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert precompile.cached_models() == {"tiny on sm_80": f"{first[0]} of {first[0]} kernels"}
    note = tmp_path / "cache" / precompile.NOTE
    held = json.loads(note.read_text())
    entry = held["tiny on sm_80"]
    assert entry["code"] == code_digest()
    for change, state in (
        (
            {"kernels": entry["kernels"] | {"0" * 64: "lost_kernel"}},
            f"{first[0]} of {int(first[0]) + 1} kernels",
        ),
        ({"triton": "3.5.9"}, "compiled by Triton 3.5.9"),
        ({"code": "0"}, "compiled by another release of this package"),
    ):
        note.write_text(json.dumps({"tiny on sm_80": entry | change}))
        assert precompile.cached_models() == {"tiny on sm_80": state}


@pytest.mark.parametrize(
    ("model", "linear"), [("tiny", "int8"), ("tiny", "int8-only"), ("tiny-cogvideox", "as-is")]
)
def test_every_family_and_kind_of_linears_compiles(
    model: str, linear: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_hopper_kernels()
    launched: list[str] = []
    monkeypatch.setattr(
        triton.JITFunction, "warmup", lambda kernel, **_: launched.append(kernel.__name__)
    )
    precompile.precompile(model, out=tmp_path, config=PatchConfig(attention="int8", linear=linear))
    assert {"hopper_kernel", "norm_silu_kernel"} <= {*launched}
    assert ("samples_kernel" in launched) == (linear == "int8")


def test_a_collection_of_garbage_does_not_disturb_the_threads(
    tmp_path: Path,
) -> None:
    needs_hopper_kernels()
    let_others_run = lambda *_: time.sleep(1e-4)  # noqa: E731
    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    gc.callbacks.append(let_others_run)
    try:
        precompile.precompile(
            "tiny", gpu="sm_80", out=tmp_path, config=PatchConfig(attention="exact")
        )
    finally:
        gc.callbacks.remove(let_others_run)
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


def test_bad_arguments(tmp_path: Path) -> None:
    needs_hopper_kernels()
    with pytest.raises(ConfigError, match="gpu.*one of sm_80.*'h100'"):
        precompile.precompile("tiny", gpu="h100", out=tmp_path)
    assert not list(tmp_path.iterdir())
