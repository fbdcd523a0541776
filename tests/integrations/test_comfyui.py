"""The ComfyUI nodes against stand-ins. `comfyui_checkout.py` runs them in ComfyUI itself."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.checkpoints.wan_model import Options, state_dict
from tests.integrations.comfyui import (
    NODES,
    Model,
    ModelPatcher,
    attention_pytorch,
    frequencies,
    load_nodes,
)
from tests.measures import relative_l2
from tests.patching.vae import COMFYUI, COMFYUI_22
from turbo_rcm_patch import RCMScheduler, errors
from turbo_rcm_patch.ops import AttentionSpec, Sparsity, sparse_linear_attention
from turbo_rcm_patch.video.rcm_times import noise_stream, rcm_times

nodes = load_nodes()
attention, wan, weights, sampler = (
    sys.modules[f"{nodes.__name__}.{name}"] for name in ("attention", "wan", "weights", "sampler")
)
Patch, LoadSLA, Sampler, VAENode = nodes.NODE_CLASS_MAPPINGS.values()
TOKENS = 160


@pytest.fixture(scope="module")
def given() -> tuple[torch.Tensor, ...]:
    """x, freqs, text."""
    torch.manual_seed(1)
    return torch.randn(1, TOKENS, 256), frequencies(TOKENS, 128), torch.randn(1, 12, 256)


def run(patcher: ModelPatcher, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out: torch.Tensor = patcher.sample(*given)
    return out


def patched(patcher: ModelPatcher, **settings: Any) -> ModelPatcher:
    given = {"attention": "int8", "pv": "bf16", "min_keys": 64, "fuse_wan": True}
    return Patch().patch(patcher, **(given | settings))[0]


def report(
    caplog: pytest.LogCaptureFixture, patcher: ModelPatcher, given: tuple[torch.Tensor, ...]
) -> str:
    """The line that a run logs."""
    caplog.clear()
    with caplog.at_level("INFO"):
        run(patcher, given)
    assert len(caplog.messages) == 1
    return caplog.messages[0]


# --- TurboRCM Patch ----------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [False, True], ids=["override", "fused"])
@pytest.mark.parametrize("kind", ["exact", "int8"])
def test_patch_computes_the_same_and_leaves_the_original_as_it_was(fuse, kind, given) -> None:
    before = ModelPatcher(Model())
    attributes = {name: set(vars(m)) for name, m in before.model.named_modules()}
    expected = run(before, given)
    after = patched(before, attention=kind, fuse_wan=fuse)
    assert attributes == {name: set(vars(m)) for name, m in before.model.named_modules()}
    out = run(after, given)
    error = relative_l2(out, expected)
    assert 1e-5 < error < 2e-2 if kind == "int8" else error < 1e-5
    assert torch.equal(run(after.clone(), given), out)
    assert len(after.object_patches) == (2 if fuse else 0)
    assert torch.equal(run(before, given), expected)
    assert not before.object_patches and before.model_options == {"transformer_options": {}}


def test_auto_is_int8_where_that_is_faster(given: tuple[torch.Tensor, ...]) -> None:
    """As `patch_model`: on a GPU from 6,144 keys on, on a CPU at once."""
    settings, gpu = attention.Settings("auto", min_keys=64), torch.device("cuda")
    assert settings.why_exact(6143, gpu) == "fewer than 6144 keys"
    assert settings.why_exact(6144, gpu) == settings.why_exact(64, torch.device("cpu")) == ""
    assert attention.Settings("int8", min_keys=64).why_exact(64, gpu) == ""
    model = ModelPatcher(Model())
    assert torch.equal(
        run(patched(model, attention="auto"), given), run(patched(model, attention="int8"), given)
    )


def test_each_run_says_what_ran_and_why(caplog, given: tuple[torch.Tensor, ...]) -> None:
    original = ModelPatcher(Model())
    model = patched(original)
    both = "TurboRCM: attentions: 2 in int8; 2 exact (fewer than 64 keys: 2)"
    assert report(caplog, model, given) == both == report(caplog, model.clone(), given)
    assert report(caplog, patched(model, fuse_wan=False), given) == both
    text = report(caplog, patched(model, min_keys=1 << 20), given)
    assert text.endswith("attentions: 4 exact (fewer than 1048576 keys: 4)")
    assert "4 exact (as chosen: 4)" in report(caplog, patched(model, attention="exact"), given)
    later = put_override(model, [], wraps=False)
    assert "2 left to another override (of a node after this one: 2)" in report(
        caplog, later, given
    )
    caplog.clear()
    later.model_options["transformer_options"]["optimized_attention_override"] = None
    silent = patched(ModelPatcher(torch.nn.Module()), fuse_wan=False)
    silent.model.diffusion_model = lambda *args: args[0]
    assert "no attention came to this node" in report(caplog, silent, given)


def test_a_later_node_decides(caplog, given: tuple[torch.Tensor, ...]) -> None:
    """Its settings are those of the whole model, and `fuse_wan=False` undoes an earlier fusion."""
    original = ModelPatcher(Model().bfloat16())  # whose norms round where they are not fused
    given = (given[0].bfloat16(), given[1], given[2].bfloat16())
    expected = run(original, given)
    assert not torch.equal(run(patched(original, attention="exact"), given), expected)
    for settings in ({}, {"fuse_wan": False}):
        exact = patched(patched(original, **settings), attention="exact", fuse_wan=False)
        assert torch.equal(run(exact, given), expected)
        int8 = patched(exact, fuse_wan=False)
        assert torch.equal(run(int8, given), run(patched(original, fuse_wan=False), given))


def test_a_changed_weight_is_seen(given: tuple[torch.Tensor, ...]) -> None:
    """As ComfyUI applies a LoRA: it replaces parameters after the node has run."""
    original = ModelPatcher(Model())
    after = patched(original, attention="exact")
    run(after, given)
    for name in ("q", "norm_q", "o"):
        module = getattr(original.model.diffusion_model.blocks[0].self_attn, name)
        module.weight = torch.nn.Parameter(module.weight * 1.5, requires_grad=False)
    assert relative_l2(run(after, given), run(original, given)) < 1e-5
    attn = original.model.diffusion_model.blocks[0].self_attn
    before = run(after, given)
    attn.norm_q.eps = attn.norm_k.eps = 0.5
    assert relative_l2(run(after, given), run(original, given)) < 1e-5
    assert relative_l2(run(after, given), before) > 1e-3
    norm = attn.norm_q
    norm.register_forward_hook(lambda module, args, out: 2 * out)
    assert relative_l2(run(after, given), run(original, given)) < 1e-5


def test_rotary_tables_live_as_long_as_the_models_own(given: tuple[torch.Tensor, ...]) -> None:
    model, (x, freqs, text) = patched(ModelPatcher(Model())), given
    gc.collect()
    before = sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)
    freqs = freqs.clone()
    run(model, (x, freqs, text))
    del freqs
    gc.collect()
    after = sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)
    assert after <= before


def test_what_other_nodes_patched_is_theirs(given: tuple[torch.Tensor, ...]) -> None:
    other = ModelPatcher(Model())
    name = "diffusion_model.blocks.0.self_attn.forward"
    other.add_object_patch(name, lambda x, freqs, transformer_options: torch.zeros_like(x))
    after = patched(other)
    assert after.object_patches[name] is other.object_patches[name]
    assert isinstance(after.object_patches[name.replace("0", "1")], wan.WanSelfAttention)
    model = patched(ModelPatcher(Model()))
    forward = model.object_patches[name]
    options = {"patches": {"attn1_patch": [print]}}
    assert torch.equal(
        forward(*given[:2], transformer_options=options), forward.original(*given[:2], options)
    )


def put_override(
    patcher: ModelPatcher, called: list[str], *, wraps: bool, scale: float = 1.0
) -> ModelPatcher:
    """Another node's override, which changes results and calls the attention that it is given, or
    computes it by itself."""
    made = patcher.clone()
    options = made.model_options["transformer_options"]
    before = options.get("optimized_attention_override")

    def override(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append("other")
        if not wraps:
            func = attention_pytorch
        elif before is not None:
            func = functools.partial(before, func)
        return func(*args, **kwargs) * scale

    options["optimized_attention_override"] = override
    return made


@pytest.mark.parametrize("fuse", [False, True], ids=["override", "fused"])
def test_an_earlier_override_is_kept(fuse: bool, caplog, given: tuple[torch.Tensor, ...]) -> None:
    """It is called for every attention, and what it does to results stays."""
    called: list[str] = []
    other = put_override(ModelPatcher(Model()), called, wraps=True, scale=0.5)
    expected = run(other, given)
    assert len(called) == 4, "self- and cross-attention of two blocks"
    model = patched(other, fuse_wan=fuse)
    assert 1e-5 < relative_l2(run(model, given), expected) < 2e-2 and len(called) == 8
    assert "2 in int8; 2 exact" in report(caplog, model, given)
    # One between two of these nodes is kept, too.
    assert 1e-5 < relative_l2(run(patched(model), given), expected) < 2e-2
    # One that computes the attention by itself goes on doing so, and the node says so.
    alone = put_override(ModelPatcher(Model()), called, wraps=False)
    assert torch.equal(run(patched(alone, fuse_wan=fuse), given), run(alone, given))
    assert "4 left to another override" in report(caplog, patched(alone, fuse_wan=fuse), given)


#: Calls of ComfyUI's models: shapes of q, k and v, heads, keywords.
FLAT, HEADS = (2, 80, 96), (2, 3, 80, 32)
HIDDEN = torch.zeros(1, 1, 80).index_fill(2, torch.arange(70, 80), torch.finfo(torch.float32).min)
SHOWN = torch.ones(2, 1, 1, 80, dtype=torch.bool)
SHOWN[0, ..., 5:9] = SHOWN[1, ..., 60:] = False
INT8: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "flat": (FLAT, FLAT, FLAT, {}),
    "flat, heads out": (FLAT, FLAT, FLAT, {"skip_output_reshape": True}),
    "heads": (HEADS, HEADS, HEADS, {"skip_reshape": True}),
    "heads, heads out": (
        HEADS, HEADS, HEADS, {"skip_reshape": True, "skip_output_reshape": True},
    ),
    "defaults by name": (FLAT, FLAT, FLAT, {"scale": None, "enable_gqa": False, "mask": None}),
    "scale": (FLAT, FLAT, FLAT, {"scale": 0.3}),
    "SD3.5, v by heads": (FLAT, FLAT, (2, 80, 3, 32), {}),
    "grouped": (HEADS, (2, 1, 80, 32), (2, 1, 80, 32), {"skip_reshape": True, "enable_gqa": True}),
    "grouped, flat": (FLAT, (2, 80, 32), (2, 80, 32), {"enable_gqa": True}),
    "HunyuanVideo": (HEADS, HEADS, HEADS, {"skip_reshape": True, "mask": HIDDEN}),
    "Lumina2": (
        (1, 80, 96), (1, 80, 96), (1, 80, 96), {"mask": HIDDEN[0].flip(1)},
    ),
    "keys of each sample": (FLAT, FLAT, FLAT, {"mask": SHOWN}),
    "keys of each sample, heads": (
        HEADS, HEADS, HEADS, {"skip_reshape": True, "mask": SHOWN},
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", INT8)
def test_calls_that_run_in_int8(call: str) -> None:
    *shapes, more = INT8[call]
    q, k, v = (torch.randn(shape) for shape in shapes)
    settings = attention.Settings(min_keys=60)
    out = attention.Override(settings)(
        attention_pytorch, q, k, v, 3, transformer_options={}, _inside_attn_wrapper=True, **more
    )
    if more.get("enable_gqa") and not more.get("skip_reshape"):
        k, v = (x.repeat(1, 1, 3) for x in (k, v))
    exact = attention_pytorch(q, k, v, 3, **more)
    assert str(settings) == "attentions: 1 in int8"
    assert out.shape == exact.shape and 1e-4 < relative_l2(out, exact) < 0.015


EXACT: dict[str, tuple[dict[str, Any], str]] = {
    "a query's mask": ({"mask": torch.ones(80, 80).bool().tril()}, "a mask of more than keys"),
    "weights of keys": ({"mask": torch.randn(1, 1, 80)}, "a mask of more than keys"),
    "no key": ({"mask": SHOWN[:1] & False}, "a mask of more than keys"),
    "few keys seen": ({"mask": HIDDEN != 0}, "fewer than 60 keys"),
    "fp32": ({"attn_precision": torch.float32}, "full precision"),
    "not low precision": ({"low_precision_attention": False}, "full precision"),
    "a keyword": ({"window": 3}, "the keyword window"),
    "wide heads": ({"q": (1, 80, 900), "k": (1, 80, 900), "v": (1, 80, 900)}, "256 channels"),
    "odd heads": ({"q": (1, 80, 65), "k": (1, 80, 65), "v": (1, 80, 65)}, "shapes"),
    "another batch": ({"k": (2, 80, 96), "v": (2, 80, 96)}, "shapes"),
    "wide values": (
        {"q": (1, 3, 80, 32), "k": (1, 3, 80, 32), "v": (1, 3, 80, 48), "skip_reshape": True},
        "values of another number",
    ),
    "dtypes": ({"dtype": torch.float64}, "dtypes"),
    "a gradient": ({"grad": True}, "a gradient"),
    "a negative scale": ({"scale": -0.1}, "a scale that is not over 0"),
}


@pytest.mark.parametrize("call", EXACT)
def test_calls_that_go_to_comfyui_as_they_are(call: str) -> None:
    more, why = dict(EXACT[call][0]), EXACT[call][1]
    dtype, grad = more.pop("dtype", torch.float32), more.pop("grad", False)
    q, k, v = (
        torch.randn(more.pop(name, (1, 80, 96)), dtype=dtype, requires_grad=grad) for name in "qkv"
    )
    got: list[Any] = []

    def func(*args: Any, **kwargs: Any) -> str:
        got.extend([args, kwargs])
        return "theirs"

    settings = attention.Settings(min_keys=60)
    assert attention.Override(settings)(func, q, k, v, 3, **more) == "theirs"
    assert got == [(q, k, v, 3), more] and "1 exact" in str(settings) and why in str(settings)


# --- TurboRCM Load SLA -------------------------------------------------------------------------


@pytest.fixture(params=["plain", "quant"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Options]:
    quant = request.param == "quant"
    dtype = torch.bfloat16 if quant else torch.float32
    options = Options(sla=True, quant=quant, freq=256, dtype=dtype)
    path = tmp_path / "turbo.pth"
    torch.save(state_dict(options), path)
    return path, options


def test_a_checkpoint_gets_comfyuis_names(checkpoint: tuple[Path, Options]) -> None:
    path, options = checkpoint
    tensors, proj_l = weights.read_wan(path)
    theirs = torch.load(path)
    plain = {name for name in theirs if "proj_l" not in name and not name.endswith(".scale")}
    assert set(tensors) == {name.replace("int8_weight", "weight") for name in plain}
    assert tensors["patch_embedding.weight"].shape == (256, 4, 1, 2, 2)
    assert sorted(proj_l) == list(range(options.layers))
    key = "blocks.1.self_attn.attn_op.local_attn.proj_l"
    assert torch.equal(proj_l[1][0], theirs[f"{key}.weight"])
    assert torch.equal(proj_l[1][1], theirs[f"{key}.bias"])


def random_proj_l() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {i: (torch.randn(128, 128) / 8, torch.randn(128)) for i in range(2)}


def test_sla_runs_in_every_block(caplog, given: tuple[torch.Tensor, ...]) -> None:
    original = ModelPatcher(Model())
    model = original.clone()
    proj_l = random_proj_l()
    assert wan.patch_wan(model, attention.Settings(pv="bf16"), proj_l=proj_l, topk=0.5) == 2
    x, freqs, _ = given
    forward = model.object_patches["diffusion_model.blocks.0.self_attn.forward"]
    attn = model.model.diffusion_model.blocks[0].self_attn
    cos, sin = freqs[0, :, 0, :, 0, 0], freqs[0, :, 0, :, 1, 0]
    expected = attn.o(
        sparse_linear_attention(
            attn.q(x), attn.k(x), attn.v(x), *proj_l[0], AttentionSpec(heads=2, pv="bf16"),
            Sparsity(topk=0.5), norm_q=attn.norm_q.weight, norm_k=attn.norm_k.weight,
            rotary=(cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
        )
    )  # fmt: skip
    assert torch.equal(forward(x, freqs, transformer_options={}), expected)
    with pytest.raises(errors.OpError, match="attn1_patch"):
        forward(x, freqs, transformer_options={"patches": {"attn1_patch": [print]}})
    # A node after the loader changes other attentions, and SLA stays.
    later = patched(model, fuse_wan=False)
    assert relative_l2(run(later, given), run(original, given)) > 0.1
    assert "2 in SLA; 2 exact (fewer than 64 keys: 2)" in report(caplog, later, given)


@pytest.mark.parametrize("blocks", [1, 3])
def test_sla_for_another_number_of_blocks_is_refused(blocks: int) -> None:
    proj_l = dict.fromkeys(range(blocks), random_proj_l()[0])
    with pytest.raises(errors.CheckpointError, match=f"{blocks} of them|weights of {blocks}"):
        wan.patch_wan(ModelPatcher(Model()), attention.Settings(), proj_l=proj_l)


@pytest.fixture
def folder_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for ComfyUI's module of that name."""
    module: Any = ModuleType("folder_paths")
    module.get_filename_list = lambda kind: ["model.pth"]
    module.get_full_path_or_raise = lambda kind, name: str(tmp_path / name)
    monkeypatch.setitem(sys.modules, "folder_paths", module)


@pytest.mark.usefixtures("folder_paths")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [("model.pth", Options(head_dim=64, sla=True), "heads of 128"),
     ("model.pth", Options(freq=256), "proj_l.*own loader"),
     ("wan.safetensors", Options(), r"Choose the \.pth")],
)  # fmt: skip
def test_weights_that_the_node_cannot_load_are_refused(name, options, text, tmp_path) -> None:
    torch.save(state_dict(options), tmp_path / name)
    with pytest.raises(errors.CheckpointError, match=text):
        LoadSLA().load(name, 0.2, "auto")


# --- TurboRCM Sampler --------------------------------------------------------------------------


def rcm_run(sigmas: torch.Tensor, x: torch.Tensor, **more: Any) -> torch.Tensor:
    """Sample with a network whose velocity is t tanh(x)."""

    def model(latents: torch.Tensor, t: torch.Tensor, seed: int) -> torch.Tensor:
        assert t.shape == x.shape[:1] and latents.dtype == x.dtype
        t = t.double().view(-1, 1, 1, 1, 1)
        return latents.double() - t * torch.tanh(latents).double() * t

    return sampler.sample_rcm(model, x, sigmas, {"seed": 7}, disable=True, **more)


@pytest.mark.parametrize("kind", ["sde", "ode"])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_sampler_is_that_of_the_scheduler(kind: str, steps: int) -> None:
    """The same velocities and the same noise give the same video."""
    scheduler = RCMScheduler(sampler=kind)
    scheduler.set_timesteps(steps)
    x = torch.randn(2, 4, 3, 5, 5) * scheduler.init_noise_sigma
    stream = noise_stream(7, "rcm-renoise")
    expected = x.double()
    for time, t in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        velocity = torch.tanh(expected.float()).double() * float(t)
        expected = scheduler.step(velocity, time, expected, generator=stream).prev_sample

    seen: list[dict[str, Any]] = []
    out = rcm_run(scheduler.sigmas.float(), x, callback=seen.append, sampler=kind)
    assert [one["i"] for one in seen] == list(range(steps))
    assert relative_l2(out, expected) < 1e-6


@pytest.mark.parametrize(("steps", "sigma_max"), [(4, 80.0), (3, 200.0)])
def test_two_samplers_with_split_sigmas_give_the_video_of_one(steps, sigma_max) -> None:
    """As the two experts of Wan 2.2 need it."""
    sigmas, x = (
        rcm_times(steps, sigma_max).float(),
        torch.randn(1, 4, 3, 5, 5, dtype=torch.float64),
    )
    more = {"steps": steps, "sigma_max": sigma_max}
    whole = rcm_run(sigmas, x, **more)
    for split in range(1, steps):
        first = rcm_run(sigmas[: split + 1], x, **more)
        assert torch.equal(rcm_run(sigmas[split:], first, **more), whole)


def test_a_split_of_another_nodes_sigmas_does_not_repeat_noise() -> None:
    """A model whose clean sample is 0 leaves t' eps, so that noise can be read off the result."""
    sigmas, x = torch.tensor([1.0, 0.96, 0.9, 0.8, 0.5, 0.0]), torch.randn(1, 1, 1, 4, 4)

    def noise(first: int, last: int) -> torch.Tensor:
        part = sigmas[first : last + 1]
        made = sampler.sample_rcm(
            lambda x, t, seed: torch.zeros_like(x), x, part, {"seed": 7}, disable=True
        )
        return made / part[-1]

    stream = noise_stream(7, "rcm-renoise")
    one, two, three = (torch.randn(x.shape, generator=stream) for _ in range(3))
    for last, expected in enumerate((one, two, three), 1):
        torch.testing.assert_close(noise(0, last), expected)
    drawn = noise(3, 4)
    assert not any(torch.allclose(drawn, other) for other in (one, two, three))


# --- what is shipped ---------------------------------------------------------------------------


@pytest.mark.usefixtures("folder_paths")
@pytest.mark.parametrize("name", ["cogvideox_t2v", "turbo_wan_t2v", "wan_i2v", "wan_t2v"])
def test_an_example_workflow_fits_the_nodes(name: str) -> None:
    path = NODES / "example_workflows" / f"{name}.json"
    assert f"`{name}`" in (NODES / "README.md").read_text(encoding="utf-8")
    workflow = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".jpg").is_file()
    by_id = {node["id"]: node for node in workflow["nodes"]}
    ours = set(nodes.NODE_CLASS_MAPPINGS) & {node["type"] for node in workflow["nodes"]}
    assert "TurboRCMPatch" in ours
    assert name != "turbo_wan_t2v" or ours == set(nodes.NODE_CLASS_MAPPINGS)
    for link, source, slot, target, to, kind in workflow["links"]:
        assert by_id[source]["outputs"][slot]["type"] == kind
        assert link in by_id[source]["outputs"][slot]["links"]
        assert by_id[target]["inputs"][to]["link"] == link
    for node in workflow["nodes"]:
        own = nodes.NODE_CLASS_MAPPINGS.get(node["type"])
        if own is not None:
            linked = {one["name"] for one in node["inputs"]}
            widgets = [name for name in own.INPUT_TYPES()["required"] if name not in linked]
            assert len(node["widgets_values"]) == len(widgets)


def test_a_copy_without_the_package_says_what_to_install(tmp_path: Path) -> None:
    """The folder is copied as it is, and depends on nothing that an index lacks."""
    copy = tmp_path / "custom_nodes" / "turbo_rcm"
    shutil.copytree(NODES, copy)
    project = tomllib.loads((copy / "pyproject.toml").read_text("utf-8"))["project"]
    assert not project["dependencies"]
    load = f"import runpy; runpy.run_path({str(copy / '__init__.py')!r})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", load], capture_output=True, text=True)
    assert f'"{sys.executable}" -m pip install' in done.stderr.splitlines()[-1]


# --- TurboRCM VAE ------------------------------------------------------------------------------


class VAE:
    """ComfyUI's object around the network of a VAE."""

    def __init__(self, network: Any) -> None:
        self.first_stage_model = network

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.first_stage_model.decode(samples)


@pytest.mark.parametrize("vae", [COMFYUI, COMFYUI_22], ids=lambda vae: vae.name)
def test_the_vae_node_leaves_the_vae_that_comes_in_as_it_was(vae: Any, caplog) -> None:
    before, z = VAE(vae.model()), torch.randn(1, 4, 3, 4, 6)
    network, expected = before.first_stage_model, before.decode(z)
    held = dict(vars(network))
    (after,) = VAENode().patch(before, "as-is")
    (again,) = VAENode().patch(after, "bf16")
    with caplog.at_level("INFO"):
        assert 0 < relative_l2(after.decode(z), expected) < 3e-6
    assert "decoder: channels-last" in caplog.text
    assert 1e-4 < relative_l2(again.decode(z), expected) < 3e-2
    assert 0 < relative_l2(after.decode(z), expected) < 3e-6
    assert before.first_stage_model is network and vars(network) == held
    assert torch.equal(before.decode(z), expected)
    for weight in network.parameters():
        weight.zero_()  # They are shared, so whatever moves them moves them for both.
    assert not after.decode(z).any()


def test_the_vae_node_refuses_another_vae() -> None:
    with pytest.raises(errors.UnknownArchitectureError, match=r"vae.*Linear.*without the node"):
        VAENode().patch(VAE(torch.nn.Linear(2, 2)), "as-is")
