"""The benchmarks on a GPU with toy sizes: events, compilers, fresh processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, main

pytestmark = pytest.mark.gpu

#: What needs more than a GPU: a package, a kernel for these sizes.
MAY_BE_MISSING = ("sage", "cuDNN")
#: Parts of benchmarks whose other parts run the same code again. A pipeline is two processes
#: a method.
ONLY = {
    "attention": "H12-N2048-D128,H12-N32760-D128-k0.1",
    "network": "1.3b-780,1.3b-live-x8",
    "pipeline": "1.3b-4-steps,patched bf16 VAE",
}


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "parallel"])
def test_a_benchmark_measures_every_method(name: str, tmp_path: Path) -> None:
    only = ["--only", ONLY[name]] if name in ONLY else []
    given = [name, "--micro", *only, "--out", str(tmp_path)]
    assert main(given) == 0
    document = json.loads((tmp_path / f"{name}.json").read_text())
    assert document["machine"]["device"] == torch.cuda.get_device_name()
    for case in document["cases"].values():
        for method, record in case["methods"].items():
            expected = any(part in method for part in MAY_BE_MISSING)
            assert record["status"] == "timed" or expected, (method, record)
