"""`as-sageattention` and the plug-ins, without an engine. `make test-engines` tries the released
ones: `released.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import processes
from tests.engines.released import (
    INT8_FLOOR,
    close,
    exact,
    inputs,
    logsumexp,
    of_lightx2v,
    of_vllm_omni,
)
from turbo_rcm_patch import errors
from turbo_rcm_patch.engines import REQUIRE, STAND_IN, SWITCH, plugins
from turbo_rcm_patch.engines.served import Served

ROOT = Path(__file__).parents[2]
SHORT, LONG = 100, 1100


def inherited(**more: str) -> dict[str, str]:
    """The environment without our switches."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(SWITCH)}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def python(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python that starts with a path of its own."""
    command, env = [sys.executable, *arguments], inherited(PYTHONPATH=path)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)


def as_sageattention(*arguments: str, **environment: str) -> processes.Done:
    front = (processes.COMMAND, "as-sageattention")
    return processes.run(*front, *arguments, env=inherited(**environment))


# --- the stand-in for sageattention --------------------------------------------------------------

PROGRAM = """
import importlib.metadata, multiprocessing, os, sys
import torch

def call():
    # as SGLang, diffusers, xDiT, LightX2V and KJNodes import it
    from sageattention import sageattn, sageattn_qk_int8_pv_fp16_triton, sageattn_varlen
    from sageattention.sm90_compile import (
        qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf_fake_impl)
    import pickle, sageattention, sageattention.core
    assert sageattention.core.sageattn is sageattn
    for name in sageattention.__all__:
        function = getattr(sageattention, name)
        assert function is pickle.loads(pickle.dumps(function))
    assert importlib.metadata.version("sageattention").startswith("2.2.0")
    q = torch.randn(1, 1100, 1, 32)
    for _ in range(11):
        sageattn(q=q, k=q, v=q, tensor_layout="NHD", is_causal=False, sm_scale=None)
    ends = torch.tensor([0, 100], dtype=torch.int32)
    sageattn_varlen(q[0, :100], q[0, :100], q[0, :100], ends, ends, 100, 100)
    print("served in", os.getpid())

if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's other threads do not survive the fork below
    call()
    for how in ("fork", "spawn"):
        worker = multiprocessing.get_context(how).Process(target=call)
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    from diffusers.models.attention_dispatch import _CAN_USE_SAGE_ATTN
    assert _CAN_USE_SAGE_ATTN
    try:
        from sageattention.core import per_thread_int8_triton  # kernels, which are not here
    except ImportError:
        sys.exit(7)
"""


def test_a_program_and_its_workers_find_our_attention(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = as_sageattention("--replace", "--", sys.executable, str(program))
    assert done.code == 7, done.err
    served = re.findall(r"served in (\d+)", done.out)
    said = [line for line in done.err.splitlines() if line.startswith("turbo_rcm_patch [")]
    for process in {served[0], served[2]}:  # the forked worker goes on counting
        mine = [line for line in said if f"[{process}]" in line]
        assert len(mine) == 4, mine
        assert "attention by turbo_rcm_patch" in mine[0] and "the device cpu" in mine[0]
        assert "1 call int8 emulated" in mine[1] and "10 calls int8" in mine[2]
        assert "1 call exact, because it is short" in mine[3]


def test_an_installed_sageattention_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "sageattention").mkdir()
    (tmp_path / "sageattention" / "__init__.py").touch()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    front = ("-m", "turbo_rcm_patch", "as-sageattention", "--", sys.executable)
    done = python(path, *front, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path) in done.stderr and "--replace" in done.stderr
    # The program may run in another environment than the command.
    said = python(os.pathsep.join([str(STAND_IN), path]), "-c", "import sageattention").stderr
    assert "ConfigError" in said and "--replace" in said


def test_a_python_without_our_package_does_not_pass_for_one_without_sageattention() -> None:
    script = "import sys; sys.modules['turbo_rcm_patch'] = None\nimport sageattention"
    said = python(str(STAND_IN), "-c", script).stderr
    assert "RuntimeError: as-sageattention" in said.splitlines()[-1]


@pytest.mark.parametrize("name", ["lightx2v", "sglang", "vllm_omni", "xdit"])
def test_an_engine_that_is_not_installed_is_named(name: str) -> None:
    with pytest.raises(errors.MissingPackageError, match="to be installed; got No module named"):
        import_module(f"turbo_rcm_patch.engines.{name}")


#: A call of torch's attention, which the stand-in may replace -> how the call is counted.
COUNTED = {
    "query=q, key=q, value=q": "int8 emulated in plain torch",
    "q, q, q, is_causal=True": "int8 emulated in plain torch",
    "q, q, q, torch.ones(1100, 1100)": "exact, because of a mask",
    "q, q, q, attn_mask=torch.ones(1100, 1100)": "exact, because of a mask",
    "q, q, q, None, 0.5": "exact, because of dropout",
    "q[0], q[0], q[0]": "exact, because of tensors of 3 dimensions",
    "q.double(), q.double(), q.double()": "exact, because of fp64",
    "q[:, :, :99], q, q": "int8 emulated in plain torch",
    "q, q[:, :, :99], q[:, :, :99]": "exact, because it is short",
}


def test_the_stand_in_counts_calls_in_torchs_form() -> None:
    script = f"""import torch, torch.nn.functional as F, sageattention, warnings
from turbo_rcm_patch.engines.standing_in import SERVED
warnings.simplefilter("ignore")
F.scaled_dot_product_attention = sageattention.sageattn
q = torch.randn(1, 1, 1100, 32)
for call in {[*COUNTED]}:
    SERVED.calls.clear()
    exec(f"F.scaled_dot_product_attention({{call}})")
    print(*SERVED.calls)"""
    done = as_sageattention("--replace", "--", sys.executable, "-c", script)
    assert done.out.splitlines() == [*COUNTED.values()], done.err


def test_required_kernels_are_an_error_where_there_are_none() -> None:
    script = f"""import torch, sageattention
for tokens in ({SHORT}, {LONG}):
    q = torch.randn(1, 1, tokens, 32)
    sageattention.sageattn(q, q, q)
    print(tokens)"""
    done = as_sageattention("--replace", "--require", "--", sys.executable, "-c", script)
    assert done.out == f"{SHORT}\n"  # a short one is exact anywhere
    assert done.code == 1 and "DeviceError" in done.err


def test_a_command_that_cannot_be_started_is_named() -> None:
    done = as_sageattention("--replace", "--", "no-such-program")
    assert done.code == 2 and "no-such-program" in done.err


# --- plug-ins ------------------------------------------------------------------------------------

#: Entry-point group -> our function, and what it imports first.
GROUPS = {
    "sglang.multimodal_gen.plugins": (plugins.sglang, "sglang"),
    "vllm_omni.general_plugins": (plugins.vllm_omni, "vllm_omni"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_plug_in_acts_only_where_the_environment_asks(group: str, monkeypatch) -> None:
    function, engine = GROUPS[group]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["entry-points"][group]["turbo_rcm_patch"].partition(":")
    assert getattr(import_module(module), name) is function
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.delenv(SWITCH, raising=False)
    function()
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(ImportError):
        function()


def modules(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Make modules whose names are in a dict each, and all packages above them."""
    for full, content in names.items():
        parts = full.split("__")
        for end in range(1, len(parts) + 1):
            if ".".join(parts[:end]) not in sys.modules:
                made = types.ModuleType(".".join(parts[:end]))
                made.__path__ = []
                monkeypatch.setitem(sys.modules, made.__name__, made)
        vars(sys.modules[".".join(parts)]).update(content)


def ours(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    full = f"turbo_rcm_patch.engines.{name}"
    monkeypatch.delitem(sys.modules, full, raising=False)
    module = import_module(full)
    monkeypatch.delitem(sys.modules, full)  # the next test imports it anew
    return module


class Layer:
    """An engine's attention class: keeps the arguments, and its own attention is exact."""

    def __init__(self, causal: bool = False, softmax_scale: float = 0.1) -> None:
        self.causal, self.softmax_scale = causal, softmax_scale

    def forward_cuda(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        return exact(q, k, v, self.softmax_scale, int(metadata.attn_mask.sum(-1)[0]))


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sglang(tokens: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang__multimodal_gen__runtime__layers__attention__backends__sage_attn"
    content = {"SageAttentionBackend": type("Backend", (), {}), "SageAttentionImpl": Layer}
    modules(monkeypatch, **{name: content})
    backend = ours(monkeypatch, "sglang").Backend
    layer = backend.get_impl_cls()()
    q, k, v = inputs(4, kv_heads, tokens, 64)
    close(layer.forward(q, k, v, None), exact(q, k, v, 0.1), tokens)
    causal = backend.get_impl_cls()(causal=True)
    close(causal.forward(q, k, v, None), exact(q, k, v, 0.1, causal=True), tokens)
    out, lse = layer.forward(q, k, v, None, return_softmax_lse=True)
    close(out, exact(q, k, v, 0.1), tokens)
    close(lse, logsumexp(q, k, 0.1), tokens)
    assert 256 in backend.get_supported_head_sizes()


def test_sglang_is_answered_for_its_backend_sage_alone() -> None:
    named = {name: types.SimpleNamespace(name=name) for name in ("SAGE_ATTN", "FA")}
    choose: Callable[..., str] = plugins._choose

    def original(cls: type, backend: Any, head_size: int, dtype: Any) -> str:
        return f"SGLang's for {backend and backend.name}"

    def chosen(backend: Any, head_size: int = 128) -> str:
        return choose(original, type, backend, head_size, torch.bfloat16)

    assert chosen(named["SAGE_ATTN"]) == "turbo_rcm_patch.engines.sglang.Backend"
    assert chosen(named["FA"]) == "SGLang's for FA" and chosen(None) == "SGLang's for None"
    with pytest.raises(ValueError, match="at most 256"):
        chosen(named["SAGE_ATTN"], 320)


def test_vllm_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"SDPABackend": type("Backend", (), {}), "SDPAImpl": Layer}
    modules(monkeypatch, vllm_omni__diffusion__attention__backends__sdpa=content)
    module = ours(monkeypatch, "vllm_omni")
    layer = module.Backend.get_impl_cls()
    of_vllm_omni(layer(), types.SimpleNamespace)
    q, k, v = inputs(4, 2, SHORT, 64)
    out = layer(causal=True).forward_cuda(q, k, v)
    close(out, exact(q, k, v, 0.1, causal=True), SHORT)
    assert module.SERVED.calls["exact, because of a mask"] == 1


@pytest.mark.parametrize("ring", [False, True], ids=["alone", "ring"])
def test_xdit(ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[Any, Any] = {}
    info: dict[str, bool] = {}
    kinds = types.SimpleNamespace(SAGE="SAGE", SDPA="SDPA")
    author = types.SimpleNamespace(
        AttentionBackendType=kinds, ATTENTION_FUNCTION_REGISTRY=registry,
        _varlen_pack_keys=lambda q, k, v, given: (given or {}).get("packed"),
        register_attention_function=lambda kind: lambda f: registry.setdefault(kind, f),
    )  # fmt: skip
    modules(
        monkeypatch,
        xfuser__core__distributed={
            "attention_backend": author,
            "get_ring_parallel_world_size": lambda: 1 + ring,
        },
        xfuser__envs={"PACKAGES_CHECKER": types.SimpleNamespace(get_packages_info=lambda: info)},
    )
    calls = ours(monkeypatch, "xdit").SERVED.calls
    registry["SDPA"] = lambda q, k, v, *_: (q + 1, None)
    q, k, v = inputs(4, 4, LONG, 64)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = registry["SAGE"](*heads_first, 0.0, False)
    close(out.transpose(1, 2), exact(q, k, v), LONG)
    assert info == {"has_sage": True} and (lse is not None) == ring
    out, _ = registry["SAGE"](*heads_first, 0.0, True)
    close(out.transpose(1, 2), exact(q, k, v, causal=True), LONG)
    mask = {"attn_mask": torch.ones(LONG, LONG, dtype=torch.bool)}
    emulated, masked = "int8 emulated in plain torch", "exact, because of a mask"
    assert calls == {emulated: 2}
    if ring:
        close(lse, logsumexp(q, k, 64**-0.5), LONG)
        for given in (mask, {"packed": "keys that a mask leaves"}):
            with pytest.raises(errors.MaskError, match="ring"):
                registry["SAGE"](*heads_first, 0.0, False, given)
    else:
        ends, n = torch.arange(3, dtype=torch.int32), LONG - 7  # the last keys are padding
        flat = [x.flatten(0, 1) for x in (q, k[:, :n], v[:, :n])]
        packed = (*flat, ends * LONG, ends * n, n, 2, LONG, 4, 64)
        out, lse = registry["SAGE"](*heads_first, 0.0, False, {"packed": packed})
        close(out.transpose(1, 2), exact(q, k, v, None, n), LONG)
        out, lse = registry["SAGE"](*heads_first, 0.0, False, mask)
        assert torch.equal(out, heads_first[0] + 1) and lse is None
        assert calls == {emulated: 3, masked: 1}
    with pytest.raises(errors.MaskError, match="dropout"):
        registry["SAGE"](*heads_first, 0.1, False)


def test_lightx2v(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, Any] = {}
    modules(
        monkeypatch,
        lightx2v__common__ops__attn__template={"AttnWeightTemplate": type("Template", (), {})},
        lightx2v__utils__registry_factory={
            "ATTN_WEIGHT_REGISTER": lambda name: lambda cls: registry.setdefault(name, cls)
        },
    )
    ours(monkeypatch, "lightx2v")
    attention = registry["turbo_rcm_int8"]()
    of_lightx2v(attention)
    q, k, v = inputs(4, 2, SHORT, 64)
    with pytest.raises(errors.MaskError, match="attn_mask"):
        attention.apply(q, k, v, attn_mask=torch.ones(1))


@pytest.mark.filterwarnings("ignore:this attention runs exactly")
def test_a_required_kernel_and_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("an engine")
    q, k, _ = inputs(2, 2, LONG, 32)
    served.attend(*inputs(1, 1, LONG, 264), "NHD")
    assert served.calls == {"exact, because of heads of more than 256 channels": 1}
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(errors.MaskError, match="a mask"):
        served.count(q, k, "NHD", "a mask")
    with pytest.raises(errors.OpError, match="256 channels"):
        served.attend(*inputs(1, 1, LONG, 264), "NHD")
    served.count(q[:, :SHORT], k[:, :SHORT], "NHD", "a mask")  # exact in any case
    assert served.calls["exact, because it is short"] == 1 and sum(served.calls.values()) == 2


def test_nothing_is_counted_or_broken_in_a_compiled_graph() -> None:
    served = Served("an engine")
    q, k, v = inputs(2, 2, LONG, 32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return served.attend(q, k, v, "NHD", False, 0.1)

    out = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    assert not served.calls
    assert float((out - exact(q, k, v, 0.1)).norm() / out.norm()) < INT8_FLOOR
