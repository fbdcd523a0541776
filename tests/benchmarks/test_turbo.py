"""`network --only turbo-1.3b` and `linear` on a CPU with toy sizes.

TurboDiffusion's own code is a stand-in here; with `--turbodiffusion PATH` it is the real one, in a
process of its own.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import turbo
from benchmarks.__main__ import main
from benchmarks.runner import Plan
from benchmarks.turbo import block_weights, exact_sla, projection, quantised_blocks
from tests.benchmarks.turbo_checkout import write_checkout
from turbo_rcm_patch import ops
from turbo_rcm_patch.ops.sparse_reference import (
    block_map,
    exact_sparse_attention,
    linear_branch,
)
from turbo_rcm_patch.patching.int8_weights import attached_int8
from turbo_rcm_patch.turbodiffusion.blocks import dequantise

CPU = torch.device("cpu")
TURBO = ["network", "--only", "turbo-1.3b", "--micro", "--device", "cpu", "--calls", "1"]
OURS = {
    "patched",
    *(
        f"patched {layout}{more}"
        for layout in ("SLA", "SageSLA")
        for more in ("", " int8", " checkpoint int8")
    ),
    "patched SageSLA compiled",
    "patched SageSLA int8 compiled",
}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    with checked_out(tmp_path) as path:
        yield path


@contextmanager
def checked_out(folder: Path) -> Iterator[Path]:
    before = set(sys.modules)
    yield write_checkout(folder / "checkout")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("rcm", "SLA"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Both classes with every method: the folder with the results, and what was printed."""
    out, printed = tmp_path_factory.mktemp("whole"), io.StringIO()
    with checked_out(out) as path, redirect_stdout(printed):
        assert main([*TURBO, "--turbodiffusion", str(path), "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_the_table_over_length_has_a_row_for_its_own_class(checkout: Path, tmp_path: Path) -> None:
    asked = ["length", "--micro", "--device", "cpu", "--calls", "1", "--only", "WanModel"]
    asked += ["--peers", "eager,eager sage,patched"]
    assert main([*asked, "--turbodiffusion", str(checkout), "--out", str(tmp_path)]) == 0
    case = read(tmp_path / "length.json")["cases"]["WanModel"]
    assert case["tokens"] == 300 and case["class"].endswith("wan2pt1.WanModel")
    assert case["methods"]["patched"]["in_int8"] == 1.0
    assert "WanModel, which calls torch" in case["methods"]["eager sage"]["reason"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    case = read(tmp_path / "length.json")["cases"]["WanModel"]
    assert "a checkout of thu-ml/TurboDiffusion" in case["reason"] and "methods" not in case


def test_its_class(whole: tuple[Path, str]) -> None:
    out, printed = whole
    document = read(out / "network_turbo.json")
    assert str(out / "checkout") in document["command"] and document["finished"]
    case = document["cases"]["WanModel"]
    assert case["finite"] and case["equal_afterwards"] and case["tokens"] == 300
    assert case["stand_ins"] == ["rotary embedding in plain torch: no flash-attn"]
    # Attention reaches the output, so that a check can see which one ran.
    assert min(case["of_full_attention"][one] for one in ("SLA", "SageSLA")) > 0.02
    found = case["variants"]
    # Its SageSLA is not replaced by anything of ours.
    assert found["eager SageSLA"]["status"] == "missing"
    assert "spas_sage_attn" in found["eager SageSLA"]["reason"]
    for name in {"eager", "eager SLA", *OURS}:
        assert found[name]["status"] == "timed", (name, found[name])
        assert found[name]["error"]["relative_l2"] < 0.012, name
    # The stand-in computes exactly: only the order of sums differs from the definition.
    assert found["eager SLA"]["error"]["relative_l2"] < 1e-5
    assert sum(found["patched SageSLA"]["groups"].values()) > 0
    assert set(case["best"]) == set(turbo.AIMS)
    assert "int8" in case["best"]["int8 linears"]["variant"]
    assert "patched SageSLA" in printed
    assert (out / "network_turbo_forward.png").is_file()


def test_attention_of_another_kind_fails(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention is not passed off as SLA."""
    monkeypatch.setattr(turbo.WanModelClass, "_entering", lambda *_: lambda *_: nullcontext())
    given = ["--peers", "patched SLA", "--turbodiffusion", str(checkout)]
    assert main([*TURBO, *given, "--out", str(tmp_path)]) == 1
    case = read(tmp_path / "network_turbo.json")["cases"]["WanModel"]
    found = case["variants"]["patched SLA"]
    assert found["status"] == "wrong" and "full attention" in found["reason"]


def test_without_a_checkout_it_is_left_out_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """diffusers' class is timed all the same."""
    assert main([*TURBO, "--peers", "eager", "--out", str(tmp_path)]) == 0
    assert "left out: ConfigError: --turbodiffusion" in capsys.readouterr().out
    cases = read(tmp_path / "network_turbo.json")["cases"]
    assert cases["WanModel"]["status"] == "missing"
    case = cases["diffusers"]
    assert case["finite"] and case["equal_afterwards"]
    assert case["variants"]["eager"]["status"] == "timed"


def test_the_class_of_diffusers(whole: tuple[Path, str]) -> None:
    case = read(whole[0] / "network_turbo.json")["cases"]["diffusers"]
    assert case["finite"] and case["equal_afterwards"]
    assert case["of_full_attention"]["SageSLA"] > 0.02
    found = case["variants"]
    assert set(found) == {"eager", *(name for name in OURS if " SLA" not in name)}
    for name, one in found.items():
        assert one["status"] == "timed" and one["error"]["relative_l2"] < 0.012, name


def test_in_diffusers_too_attention_of_another_kind_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turbo.DiffusersClass, "_attached", lambda *_: nullcontext())
    assert main([*TURBO, "--peers", "patched SageSLA", "--out", str(tmp_path)]) == 1
    case = read(tmp_path / "network_turbo.json")["cases"]["diffusers"]
    assert case["variants"]["patched SageSLA"]["status"] == "wrong"


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    given = ["--turbodiffusion", str(tmp_path)]
    assert main([*TURBO, *given, "--peers", "eager", "--out", str(tmp_path)]) == 1
    case = read(tmp_path / "network_turbo.json")["cases"]["WanModel"]
    assert "wan2pt1.py" in case["reason"]


def test_the_attention_of_its_class_is_put_back(checkout: Path, tmp_path: Path) -> None:
    shape = turbo.WanModelClass(Plan(out=tmp_path, turbodiffusion=checkout))
    model = shape.build(CPU, 0, micro=True)
    before = [dict(vars(module)) for module in model.modules()]
    for layout in ("SLA", "SageSLA"):
        with pytest.raises(KeyError), shape.truth(model, layout, 0.5):
            raise KeyError
    after = [dict(vars(module)) for module in model.modules()]
    assert before == after


@pytest.mark.parametrize("sizes", [(128, 64), (64, 128)], ids=str)
def test_the_definition_is_the_references(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64) for _ in range(3))
    sparsity = ops.Sparsity(topk=0.7, block_q=sizes[0], block_k=sizes[1])
    one = projection(64, CPU, 0)
    found = exact_sla(q, k, v, one, sparsity)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    given = {"block_q": sizes[0], "block_k": sizes[1]}
    blocks = block_map(q, k, count=sparsity.count(300), dtype=q.dtype, **given)
    truth = exact_sparse_attention(q, k, v, blocks, sm_scale=64**-0.5, **given)
    truth += linear_branch(q, k, v, one.weight, one.bias, dtype=torch.float32)
    torch.testing.assert_close(found, truth.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_weights_with_a_scale_per_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 300)
    weight[130:, :100] *= 50
    int8, scale = quantised_blocks(weight)
    assert int8.shape == weight.shape and scale.shape == (2, 3)
    expected = weight[128:, :128].abs().max() / 128
    torch.testing.assert_close(scale[1, 0], expected)
    assert F.mse_loss(dequantise(int8, scale), weight).sqrt() < 0.02 * weight.std()
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.GELU())
    before = model[0].weight.detach().clone()
    with block_weights(SimpleNamespace(blocks=model), "inductor"):
        assert attached_int8(model[0]) is not None
        assert not torch.equal(model[0].weight, before)
    assert attached_int8(model[0]) is None
    assert torch.equal(model[0].weight, before)


def test_linear(tmp_path: Path) -> None:
    arguments = ["linear", "--micro", "--device", "cpu", "--calls", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    (case,) = read(tmp_path / "linear.json")["cases"].values()
    found = case["methods"]
    for name in [name for name in found if "portable" in name or "epilogue" in name]:
        assert found.pop(name)["status"] == "missing"  # a kernel, and no GPU
    assert {one["status"] for one in found.values()} == {"timed"}
    closed = found.pop("bf16 then skip")
    assert 0 < closed["error"]["relative_l2"] < 3e-3 and closed["graph_milliseconds"]["median"] > 0
    errors = {name: one["error"]["relative_l2"] for name, one in found.items()}
    assert errors["torch bf16"] < errors["int8 scale per row"] < errors["int8 scale per block"]
    assert errors["int8 scale per block"] < 0.015
    assert all(one["product_milliseconds"] > 0 and one["tops"] > 0 for one in found.values())


def test_the_real_class(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    path = pytestconfig.getoption("--turbodiffusion")
    if path is None:
        pytest.skip("needs --turbodiffusion PATH, a checkout of thu-ml/TurboDiffusion")
    command = [sys.executable, "-m", "benchmarks", *TURBO]
    done = subprocess.run(
        [*command, "--turbodiffusion", path, "--out", str(tmp_path)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    case = read(tmp_path / "network_turbo.json")["cases"]["WanModel"]
    assert case["finite"] and case["equal_afterwards"], done.stderr[-2000:]
    for name in {"eager", *OURS}:
        assert case["variants"][name]["status"] == "timed", name
        assert case["variants"][name]["error"]["relative_l2"] < 0.012, name
