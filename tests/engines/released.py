"""Our attention in the released engines: `make test-engines`, or some by name.

    python -m tests.engines.released --folder build/engines [sglang vllm-omni xdit ...]

Each engine's newest wheel is taken from the package index without its dependencies. What a CPU can
import beside it is installed, the rest is stubbed, and a Hopper GPU is pretended. Then in a
spawned worker the engine's own selector has to return our class, and the engine's own layer the
numbers of exact attention. LightX2V has no wheel: give `--lightx2v CHECKOUT`.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).parents[2]
#: Pure Python, or small: what the engines import before their attention.
BESIDE = (
    "addict aenum aiohappyeyeballs aiohttp aiosignal attrs cloudpickle dill einops fastapi "
    "frozenlist gguf loguru msgspec multidict orjson prometheus_client propcache pybase64 "
    "python-multipart pyzmq remote_pdb setproctitle sse_starlette starlette uvicorn xxhash yarl"
)
#: int8 q and k over exact attention, relative L2 (tests/ops/test_sageattn.py).
INT8_FLOOR = 0.015


@dataclass(frozen=True)
class Engine:
    """How an engine is tried: its wheel, its switch, and what only a GPU's machine can import."""

    check: Callable[[], None]
    wheel: str = ""
    stubs: tuple[str, ...] = ("torchvision",)
    environment: tuple[tuple[str, str], ...] = (("TURBO_RCM_PATCH", "1"),)
    stand_in: bool = False


class Capability(NamedTuple):
    major: int
    minor: int


# --- checks, each in a spawned worker ------------------------------------------------------------


def sglang() -> None:
    from sglang.multimodal_gen.runtime.layers.attention import layer, selector
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
    from sglang.multimodal_gen.runtime.platforms import (
        AttentionBackendEnum,
        initialize_current_platform,
        plugins,
    )

    initialize_current_platform()
    plugins.load_plugins()
    plugins.apply_plugin_hooks()
    sage = AttentionBackendEnum.SAGE_ATTN
    found = selector.get_attn_backend(128, torch.bfloat16, selected_attention_backend=sage)
    from turbo_rcm_patch.engines.sglang import SERVED, Backend

    assert found is Backend, found
    assert Backend.supports_packed_varlen() and Backend.supports_ring_rotation()
    other = AttentionBackendEnum.TORCH_SDPA
    assert selector.get_attn_backend(64, torch.bfloat16, selected_attention_backend=other) != found
    for heads, kv_heads, dim in ((4, 4, 64), (4, 2, 128)):
        own = layer.LocalAttention(
            heads, dim, kv_heads, softmax_scale=0.1, required_attention_backend=sage,
            compute_dtype=torch.float32,
        )  # fmt: skip
        for tokens in (100, 1100):
            q, k, v = inputs(heads, kv_heads, tokens, dim)
            with set_forward_context(0, None):
                close(own(q, k, v), exact(q, k, v, 0.1), tokens)
            with set_forward_context(0, None):  # a mask is SGLang's own
                mask = torch.arange(tokens)[None] < tokens - 7
                close(own(q, k, v, attn_mask=mask), exact(q, k, v, 0.1, tokens - 7), 0)
        out, lse = own.attn_impl.forward(q, k, v, None, return_softmax_lse=True)
        close(lse, logsumexp(q, k, 0.1), 1100)
        bounds = (0, 1060, 1100)
        ends = torch.tensor(bounds, dtype=torch.int32)
        out = own.attn_impl.forward_varlen(q[0], k[0], v[0], cu_seqlens=ends, max_seqlen=1060)
        for a, b in zip(bounds[:-1], bounds[1:], strict=True):
            part = [x[:1, a:b] for x in (q, k, v)]
            close(out[None, a:b], exact(*part, 0.1), b - a)
    assert set(SERVED.calls) == {"int8 emulated in plain torch", "exact, because it is short"}


def vllm_omni() -> None:
    folder = importlib.metadata.distribution("vllm-omni").locate_file("vllm_omni")
    for name in ("vllm_omni", "vllm_omni.diffusion"):  # packages that import all of vllm
        package = types.ModuleType(name)
        package.__path__ = [str(Path(str(folder)).joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    import vllm_omni.platforms as platforms
    from vllm_omni.platforms.cuda.platform import CudaOmniPlatform

    CudaOmniPlatform.get_device_capability = classmethod(lambda *_: Capability(9, 0))
    platforms._current_omni_platform = CudaOmniPlatform()
    from vllm_omni.diffusion.attention import selector
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    found = selector._cached_get_backend_cls("SAGE_ATTN", 128)
    from turbo_rcm_patch.engines.vllm_omni import SERVED, Backend

    assert found is Backend, found
    of_vllm_omni(Backend.get_impl_cls()(4, 64, 0.1, num_kv_heads=2), AttentionMetadata)
    assert SERVED.calls["exact, because of a mask"] == 1


def xdit() -> None:
    from xfuser.core.distributed import attention_backend as author
    from xfuser.core.distributed.runtime_state import env_info
    from xfuser.model_executor.layers import usp
    from xfuser.model_executor.layers.attention_mask import make_attn_mask_with_meta

    import turbo_rcm_patch.engines.xdit as ours

    sage = author.AttentionBackendType.SAGE
    function = usp._get_attention_function(sage)
    assert function.__wrapped__ is ours.attention and env_info["has_sage"]
    ours.get_ring_parallel_world_size = lambda: 1  # xDiT asks process groups of GPUs
    for tokens in (100, 1100):
        q, k, v = inputs(4, 4, tokens, 64)
        first = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = function(*first, dropout_p=0.0, is_causal=False)
        close(out.transpose(1, 2), exact(q, k, v), tokens)
        assert lse is None
        seen = torch.arange(tokens)[None].expand(2, -1) < tokens - 7
        meta = vars(make_attn_mask_with_meta(seen))
        for given, keys in ((meta, tokens), ({"attn_mask": meta["attn_mask"]}, 0)):
            out, _ = function(*first, dropout_p=0.0, is_causal=False, attention_kwargs=given)
            close(out.transpose(1, 2), exact(q, k, v, None, tokens - 7), keys)
    ours.get_ring_parallel_world_size = lambda: 2
    _, lse = function(*first, dropout_p=0.0, is_causal=False)
    close(lse, logsumexp(q, k, 64**-0.5), 1100)


def lightx2v() -> None:
    from lightx2v.utils.registry_factory import ATTN_WEIGHT_REGISTER

    import turbo_rcm_patch.engines.lightx2v as ours

    attention = ATTN_WEIGHT_REGISTER[ours.NAME]()
    assert type(attention) is ours.Attention
    of_lightx2v(attention)


def fastvideo() -> None:
    from fastvideo import platforms
    from fastvideo.attention.layer import LocalAttention
    from fastvideo.forward_context import set_forward_context
    from fastvideo.platforms.cuda import CudaPlatform

    platforms._current_platform = CudaPlatform()
    own = LocalAttention(
        4, 64, supported_attention_backends=(platforms.AttentionBackendEnum.SAGE_ATTN,)
    )
    import sageattention

    from turbo_rcm_patch.engines.standing_in import SERVED

    module = sys.modules[type(own.attn_impl).__module__]
    assert module.sageattn is sageattention.sageattn
    for tokens in (100, 1100):
        q, k, v = inputs(4, 4, tokens, 64)
        with set_forward_context(0, None):
            close(own(q, k, v), exact(q, k, v), tokens)
    assert sum(SERVED.calls.values()) == 2


SGLANG_STUBS = (
    *("torchvision", "IPython", "tvm_ffi", "sentencepiece", "compressed_tensors"),
    *("sgl_kernel", "pynvml"),
)
ENGINES = {
    "sglang": Engine(sglang, "sglang", SGLANG_STUBS),
    "vllm-omni": Engine(
        vllm_omni, "vllm-omni", ("torchvision", "vllm", "tiktoken", "opentelemetry")
    ),
    "xdit": Engine(xdit, "xfuser", ("torchvision", "yunchang", "distvae"), ()),
    "lightx2v": Engine(
        lightx2v, "", ("torchvision", "torchaudio", "av", "decord", "cv2", "flash_attn"), ()
    ),
    "fastvideo": Engine(
        fastvideo, "fastvideo", environment=(("FASTVIDEO_ATTENTION_BACKEND", "SAGE_ATTN"),),
        stand_in=True,
    ),
}  # fmt: skip


# --- numbers -------------------------------------------------------------------------------------


def inputs(heads: int, kv_heads: int, tokens: int, dim: int) -> list[Tensor]:
    """q, k and v [2, tokens, heads, dim]."""
    torch.manual_seed(tokens)
    return [torch.randn(2, tokens, n, dim) for n in (heads, kv_heads, kv_heads)]


def exact(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, keys: int | None = None,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    q, k, v = (x.double().transpose(1, 2) for x in (q, k[:, :keys], v[:, :keys]))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal, enable_gqa=gqa)
    return out.transpose(1, 2)


def logsumexp(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, H, Nq]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->bhqk", q.double() * scale, k.double()).logsumexp(-1)


def close(made: Tensor, truth: Tensor, keys: int) -> None:
    """Exact below 1,024 keys; above int8, and not exact."""
    error = float((made.double() - truth).norm() / truth.norm())
    assert made.shape == truth.shape, (made.shape, truth.shape)
    assert error < (INT8_FLOOR if keys >= 1024 else 1e-5), error
    assert keys < 1024 or error > 1e-7, "int8 did not run"


# --- layers, as `test_engines.py` tries them with stand-ins --------------------------------------


def of_vllm_omni(layer: Any, metadata: Callable[..., Any]) -> None:
    """Attention of 4 heads over 2 with the scale 0.1; a mask is vllm-omni's own."""
    for tokens in (100, 1100):
        q, k, v = inputs(4, 2, tokens, 64)
        for unmasked in (None, metadata(attn_mask=None)):
            close(layer.forward_cuda(q, k, v, unmasked), exact(q, k, v, 0.1), tokens)
        mask = torch.arange(tokens)[None].expand(2, -1) < tokens - 7
        masked = layer.forward_cuda(q, k, v, metadata(attn_mask=mask))
        close(masked, exact(q, k, v, 0.1, tokens - 7), 0)


def of_lightx2v(attention: Any) -> None:
    """Attention alone, packed, with a scale and with its logsumexp."""
    for tokens in (100, 1100):
        q, k, v = inputs(4, 2, tokens, 64)
        whole = exact(q, k, v).flatten(2).flatten(0, 1)
        close(attention.apply(q, k, v, block_idx=0, scheduler=None), whole, tokens)
        causal = exact(q, k, v, 0.1, causal=True).flatten(2).flatten(0, 1)
        close(attention.apply(q, k, v, causal=True, sm_scale=0.1), causal, tokens)
        for bounds in ((0, tokens), (0, tokens - 9, tokens)):
            ends = torch.tensor(bounds, dtype=torch.int32)
            packed = (q[0], k[0], v[0], ends, ends, bounds[1], bounds[1])
            out = attention.apply(*packed, softmax_scale=0.1, grid_sizes=None)
            for a, b in zip(bounds[:-1], bounds[1:], strict=True):
                part = [x[:1, a:b] for x in (q, k, v)]
                close(out[a:b], exact(*part, 0.1)[0].flatten(1), b - a)
        for scale in (None, 0.1):
            _, lse = attention.apply_with_lse(q[0], k[0], v[0], scale)
            close(lse, logsumexp(q, k, scale or 64**-0.5)[0].T, tokens)


# --- a machine with a GPU, pretended -------------------------------------------------------------


class Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    def __getitem__(cls, _: object) -> Any:
        return cls


def named_object(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def decorator(cls: Any = None, **_: object) -> Any:
    return cls or decorator


#: What the engines do more with than hold it.
KNOWN = {
    "__version__": "99.0",
    "__version_tuple__": (0, 0),
    "VLLM_PLUGINS": None,
    "config": decorator,
    "resolve_obj_by_qualname": named_object,
}


class Stub(types.ModuleType):
    """A module with every name: classes, versions and mocks."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith("__version"):
            raise AttributeError(name)
        blank = {"__init_subclass__": classmethod(lambda cls, **_: None)}
        made: Any = Anything(name, (), blank) if name[0].isupper() else MagicMock(name=name)
        made = KNOWN.get(name, made)
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def pretend(stubs: tuple[str, ...]) -> None:
    """Stub modules, and answer as a machine with one H100 does. Tensors stay on the CPU."""
    import diffusers
    import transformers

    # Loaded before the stubs, so that they do not see them.
    assert diffusers.DiffusionPipeline and transformers.PreTrainedModel and transformers.AutoModel
    sys.meta_path.insert(0, Stubs(stubs))
    card = types.SimpleNamespace(
        gcnArchName="", name="H100", major=9, minor=0, multi_processor_count=132,
        total_memory=80 << 30,
    )  # fmt: skip
    torch.version.cuda = "13.0"
    for name, answer in {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "H100",
        "get_device_capability": (9, 0), "get_device_properties": card,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def work(name: str) -> None:
    """What a spawned worker does."""
    engine = ENGINES[name]
    pretend(engine.stubs)
    engine.check()
    version = importlib.metadata.version(engine.wheel) if engine.wheel else "a checkout"
    print(f"{name} {version}: fine", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "engines")
    parser.add_argument("--lightx2v", type=Path, help="a checkout of LightX2V")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("engines", nargs="*", choices=[*ENGINES, []], metavar="ENGINE")
    given = parser.parse_args()
    if given.worker:
        child = multiprocessing.get_context("spawn").Process(target=work, args=(given.worker,))
        child.start()
        child.join()
        return int(child.exitcode != 0)

    def install(folder: Path, *what: str) -> str:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(folder), *what], check=True)
        return str(folder)

    ours = install(given.folder / "ours", "--no-build-isolation", str(ROOT))
    beside = install(given.folder / "beside", *BESIDE.split())
    failed = []
    for name in given.engines or ENGINES:
        engine = ENGINES[name]
        if name == "lightx2v" and given.lightx2v is None:
            print("lightx2v: left out, because it has no wheel; give --lightx2v CHECKOUT")
            continue
        own = str(given.lightx2v.resolve()) if name == "lightx2v" else ""
        own = own or install(given.folder / name, engine.wheel)
        path = os.pathsep.join([ours, own, beside])
        command = [sys.executable, "-W", "ignore", __file__, "--worker", name]
        if engine.stand_in:
            front = ["-m", "turbo_rcm_patch", "as-sageattention", "--replace", "--"]
            command = [sys.executable, *front, *command]
        environment = os.environ | dict(engine.environment) | {"PYTHONPATH": path}
        if subprocess.run(command, env=environment, cwd=given.folder).returncode:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all fine")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
