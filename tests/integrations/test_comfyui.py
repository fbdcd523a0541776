"""The ComfyUI nodes, against stand-ins, and against a checkout: `pytest --comfyui=PATH`."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations.comfyui import (
    NODES,
    ROOT,
    Model,
    ModelPatcher,
    attention_pytorch,
    frequencies,
    load_nodes,
)
from tests.measures import relative_l2
from tests.turbodiffusion.wan_model import Options, state_dict
from turbo_rcm_patch import RCMScheduler, errors
from turbo_rcm_patch.ops import AttentionSpec, Sparsity, sparse_linear_attention
from turbo_rcm_patch.turbodiffusion import read_checkpoint, write_transformer
from turbo_rcm_patch.video.rcm_times import noise_stream, rcm_times

nodes = load_nodes()
attention, wan, weights, sampler = (
    sys.modules[f"{nodes.__name__}.{name}"] for name in ("attention", "wan", "weights", "sampler")
)
Patch, LoadSLA, Sampler = nodes.NODE_CLASS_MAPPINGS.values()
TOKENS = 160


@pytest.fixture(scope="module")
def given() -> tuple[torch.Tensor, ...]:
    """x, freqs, text."""
    torch.manual_seed(1)
    return torch.randn(1, TOKENS, 256), frequencies(TOKENS, 128), torch.randn(1, 12, 256)


def run(patcher: ModelPatcher, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A forward as ComfyUI does it: the patcher is loaded, runs, and is unloaded."""
    patcher.patch_model()
    try:
        options = patcher.model_options["transformer_options"]
        return patcher.model.diffusion_model(*given, options)
    finally:
        patcher.unpatch_model()


def patched(patcher: ModelPatcher, **settings: Any) -> ModelPatcher:
    given = {"attention": "int8", "pv": "bf16", "min_keys": 64, "fuse_wan": True}
    return Patch().patch(patcher, **(given | settings))[0]


# --- TurboRCM Patch ----------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [False, True], ids=["override", "fused"])
@pytest.mark.parametrize("kind", ["exact", "int8"])
def test_patch_computes_the_same(fuse: bool, kind: str, given: tuple[torch.Tensor, ...]) -> None:
    before = ModelPatcher(Model())
    expected = run(before, given)
    after = patched(before, attention=kind, fuse_wan=fuse)
    error = relative_l2(run(after, given), expected)
    if kind == "int8":
        assert 1e-5 < error < 2e-2
    else:
        assert error < 1e-5
    assert len(after.object_patches) == (2 if fuse else 0)


def test_patch_leaves_the_original_as_it_was(given: tuple[torch.Tensor, ...]) -> None:
    before = ModelPatcher(Model())
    attributes = {name: set(vars(m)) for name, m in before.model.named_modules()}
    expected = run(before, given)
    after = patched(before)
    assert attributes == {name: set(vars(m)) for name, m in before.model.named_modules()}
    assert not torch.equal(run(after, given), expected)
    assert torch.equal(run(before, given), expected)
    assert not before.object_patches and before.model_options == {"transformer_options": {}}


def test_a_later_node_replaces_the_settings_of_an_earlier_one(
    given: tuple[torch.Tensor, ...],
) -> None:
    original = ModelPatcher(Model())
    twice = patched(patched(original), attention="exact")
    assert relative_l2(run(twice, given), run(original, given)) < 1e-5


def test_a_clone_of_a_patched_model_is_patched(given: tuple[torch.Tensor, ...]) -> None:
    after = patched(ModelPatcher(Model()))
    assert torch.equal(run(after.clone(), given), run(after, given))


def test_a_changed_weight_is_seen(given: tuple[torch.Tensor, ...]) -> None:
    """As ComfyUI applies a LoRA: it replaces parameters after the node has run."""
    original = ModelPatcher(Model())
    after = patched(original, attention="exact")
    run(after, given)
    for name in ("q", "norm_q", "o"):
        module = getattr(original.model.diffusion_model.blocks[0].self_attn, name)
        module.weight = torch.nn.Parameter(module.weight * 1.5, requires_grad=False)
    assert relative_l2(run(after, given), run(original, given)) < 1e-5


def test_a_norm_that_is_not_plain_is_called(given: tuple[torch.Tensor, ...]) -> None:
    original = ModelPatcher(Model())
    norm = original.model.diffusion_model.blocks[0].self_attn.norm_q
    norm.register_forward_hook(lambda module, args, out: 2 * out)
    after = patched(original, attention="exact")
    assert relative_l2(run(after, given), run(original, given)) < 1e-5


def test_what_other_nodes_patched_is_theirs(given: tuple[torch.Tensor, ...]) -> None:
    original = ModelPatcher(Model())
    other = original.clone()
    name = "diffusion_model.blocks.0.self_attn.forward"
    other.add_object_patch(name, lambda x, freqs, transformer_options: torch.zeros_like(x))
    after = patched(other)
    assert after.object_patches[name] is other.object_patches[name]
    assert isinstance(after.object_patches[name.replace("0", "1")], wan.WanSelfAttention)


def test_an_attn1_patch_or_a_later_override_goes_to_the_author(
    given: tuple[torch.Tensor, ...],
) -> None:
    after = patched(ModelPatcher(Model()))
    x, freqs, _ = given
    called: list[str] = []

    def override(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append("override")
        return func(*args, **kwargs)

    forward = after.object_patches["diffusion_model.blocks.0.self_attn.forward"]
    for options in ({attention.OVERRIDE: override}, {"patches": {"attn1_patch": []}}):
        exact = forward.original(x, freqs, transformer_options=options)
        assert torch.equal(forward(x, freqs, transformer_options=options), exact)
    assert called == ["override"] * 2


def test_an_earlier_override_gets_what_is_not_for_us() -> None:
    q, k = torch.randn(1, 80, 64), torch.randn(1, 12, 64)
    ours = attention.Override(
        attention.Settings(min_keys=64), lambda func, *args, **kwargs: "theirs"
    )
    assert ours(attention_pytorch, q, k, k, 2) == "theirs"
    assert isinstance(ours(attention_pytorch, q, q, q, 2), torch.Tensor)


def put_override(patcher: ModelPatcher, called: list[int], wraps: bool) -> ModelPatcher:
    """A clone with the override of another node, which calls the one before it."""
    made = patcher.clone()
    options = made.model_options["transformer_options"]
    before = options.get(attention.OVERRIDE)

    def override(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append(1)
        return func(*args, **kwargs) if before is None else before(func, *args, **kwargs)

    options[attention.OVERRIDE] = functools.wraps(before)(override) if wraps else override
    return made


@pytest.mark.parametrize("fuse", [False, True], ids=["override", "fused"])
def test_an_override_that_wraps_ours_is_not_ours(
    fuse: bool, given: tuple[torch.Tensor, ...]
) -> None:
    called: list[int] = []
    other = put_override(patched(ModelPatcher(Model()), fuse_wan=fuse), called, wraps=True)
    run(other, given)
    assert len(called) == 4, "self- and cross-attention of two blocks"
    run(patched(other, attention="exact", fuse_wan=fuse), given)
    assert len(called) == 8


@pytest.mark.parametrize("fuse", [False, True], ids=["override", "fused"])
@pytest.mark.parametrize("between", [False, True], ids=["next", "another-between"])
def test_a_later_exact_node_makes_an_int8_model_exact(
    fuse: bool, between: bool, given: tuple[torch.Tensor, ...]
) -> None:
    original = ModelPatcher(Model())
    model = patched(original, fuse_wan=fuse)
    if between:
        model = put_override(model, [], wraps=False)
    later = patched(model, attention="exact", fuse_wan=False)
    assert relative_l2(run(later, given), run(original, given)) < 1e-5
    assert relative_l2(run(model, given), run(original, given)) > 1e-5


def test_copies_of_options_share_the_override() -> None:
    """A deepcopy of `before` would copy whatever another node keeps in it."""
    ours = attention.Override(attention.Settings(), torch.nn.Linear(2, 2))
    assert copy.deepcopy({"options": [ours]})["options"][0] is ours


@pytest.mark.parametrize("inputs", [False, True], ids=["flat", "heads"])
@pytest.mark.parametrize("outputs", [False, True], ids=["flat-out", "heads-out"])
def test_override_reads_both_layouts(inputs: bool, outputs: bool) -> None:
    shape = (2, 3, 80, 32) if inputs else (2, 80, 96)
    q, k, v = (torch.randn(shape) for _ in range(3))
    more = {"skip_reshape": inputs, "skip_output_reshape": outputs}
    out = attention.Override(attention.Settings(min_keys=64))(
        attention_pytorch, q, k, v, 3, transformer_options={}, _inside_attn_wrapper=True, **more
    )
    exact = attention_pytorch(q, k, v, 3, **more)
    assert out.shape == exact.shape and 1e-4 < relative_l2(out, exact) < 0.015


@pytest.mark.parametrize(
    "more",
    [
        {"mask": torch.ones(80, 80).bool()},
        {"attn_precision": torch.float32},
        {"low_precision_attention": False},
        {"scale": 0.5},
        {"enable_gqa": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_override_leaves_what_it_cannot_do_to_comfyui(more: dict[str, Any]) -> None:
    q = torch.randn(1, 80, 64)
    got: list[dict[str, Any]] = []

    def func(*args: Any, **kwargs: Any) -> str:
        got.append(kwargs)
        return "theirs"

    ours = attention.Override(attention.Settings(min_keys=1))
    assert ours(func, q, q, q, 2, **more) == "theirs"
    assert got == [more]


@pytest.mark.parametrize("shape", [(1, 80, 600), (1, 80, 65)], ids=["wide-heads", "odd-heads"])
def test_override_leaves_other_shapes(shape: tuple[int, ...]) -> None:
    ours = attention.Override(attention.Settings(min_keys=1))
    q = torch.randn(shape)
    assert ours(lambda *args, **kwargs: "theirs", q, q, q, 2) == "theirs"


@pytest.mark.parametrize(("queries", "keys"), [(2, 1), (1, 2)])
def test_override_leaves_keys_of_another_batch(queries: int, keys: int) -> None:
    """torch broadcasts them."""
    q, k = torch.randn(queries, 2, 80, 32), torch.randn(keys, 2, 80, 32)
    ours = attention.Override(attention.Settings(min_keys=1))
    out = ours(attention_pytorch, q, k, k, 2, skip_reshape=True)
    assert torch.equal(out, attention_pytorch(q, k, k, 2, skip_reshape=True))


# --- TurboRCM Load SLA -------------------------------------------------------------------------


@pytest.fixture(params=["plain", "quant"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Options]:
    options = Options(
        sla=True,
        quant=request.param == "quant",
        freq=256,
        dtype=torch.bfloat16 if request.param == "quant" else torch.float32,
    )
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


def test_a_converted_folder_holds_the_same(
    checkpoint: tuple[Path, Options], tmp_path: Path
) -> None:
    path, _ = checkpoint
    folder = tmp_path / "converted"
    folder.mkdir()
    write_transformer(read_checkpoint(path), folder)
    expected, projections = weights.read_wan(path)
    file = next(folder.glob("*.safetensors"))
    for source in (folder, file):
        tensors, proj_l = weights.read_wan(source)
        assert set(tensors) == set(expected)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        for block, (weight, bias) in proj_l.items():
            assert torch.equal(weight, projections[block][0])
            assert torch.equal(bias, projections[block][1])


def test_heads_of_other_widths_are_refused(tmp_path: Path) -> None:
    torch.save(state_dict(Options(head_dim=64, sla=True)), tmp_path / "model.pth")
    with pytest.raises(errors.CheckpointError, match="heads of 128"):
        weights.read_wan(tmp_path / "model.pth")


def random_proj_l() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {i: (torch.randn(128, 128) / 8, torch.randn(128)) for i in range(2)}


def test_sla_weights_are_copied_to_a_device_once() -> None:
    weight, bias = random_proj_l()[0]
    for one in (wan.SparseLinear(weight, bias, 0.5), wan.SparseLinear(weight, None, 0.5)):
        assert one.on(weight.device)[0] is weight and one.on(weight.device)[1] is one.bias
        there = one.on(torch.device("meta"))
        assert there is one.on(torch.device("meta")) and there[0].is_meta


def test_sla_runs_in_every_block(given: tuple[torch.Tensor, ...]) -> None:
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
    later = patched(model)
    assert later.object_patches["diffusion_model.blocks.0.self_attn.forward"].sparse is not None
    assert relative_l2(run(later, given), run(original, given)) > 0.1


def test_sla_for_another_number_of_blocks_is_refused() -> None:
    proj_l = random_proj_l()
    del proj_l[1]
    with pytest.raises(errors.CheckpointError, match="1 of them"):
        wan.patch_wan(ModelPatcher(Model()), attention.Settings(), proj_l=proj_l)
    proj_l = dict(enumerate([random_proj_l()[0]] * 3))
    with pytest.raises(errors.CheckpointError, match="weights of 3"):
        wan.patch_wan(ModelPatcher(Model()), attention.Settings(), proj_l=proj_l)


def modules(monkeypatch: pytest.MonkeyPatch, **functions: dict[str, Any]) -> None:
    """Stand-ins for modules of ComfyUI, by name with _ for a dot."""
    for name, members in functions.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)


def test_the_loader_node(
    checkpoint: tuple[Path, Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = checkpoint
    loaded: list[dict[str, torch.Tensor]] = []

    def load(tensors: dict[str, torch.Tensor]) -> ModelPatcher:
        loaded.append(tensors)
        return ModelPatcher(Model())

    modules(
        monkeypatch,
        comfy={},
        comfy__sd={"load_diffusion_model_state_dict": load},
        folder_paths={
            "get_filename_list": lambda kind: [path.name],
            "get_full_path_or_raise": lambda kind, name: str(path.parent / name),
        },
    )
    assert LoadSLA.INPUT_TYPES()["required"]["weights"] == ([path.name],)
    (model,) = LoadSLA().load(path.name, 0.2, "auto")
    assert len(loaded) == 1 and len(model.object_patches) == 2
    plain = path.with_name("plain.pth")
    torch.save(state_dict(Options(freq=256)), plain)
    with pytest.raises(errors.CheckpointError, match="proj_l"):
        LoadSLA().load(plain.name, 0.2, "auto")


# --- TurboRCM Sampler --------------------------------------------------------------------------


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

    def model(given: torch.Tensor, t: torch.Tensor, seed: int) -> torch.Tensor:
        assert t.shape == (2,) and given.dtype == torch.float32
        times = t.double().view(-1, 1, 1, 1, 1)
        return given.double() - times * torch.tanh(given).double() * times

    seen: list[dict[str, Any]] = []
    out = sampler.sample_rcm(
        model, x, scheduler.sigmas.float(), {"seed": 7}, seen.append, True, sampler=kind
    )
    assert [one["i"] for one in seen] == list(range(steps))
    assert relative_l2(out, expected) < 1e-6


def rcm_run(sigmas: torch.Tensor, x: torch.Tensor, **more: Any) -> torch.Tensor:
    def model(given: torch.Tensor, t: torch.Tensor, seed: int) -> torch.Tensor:
        return given.double() - (t * torch.tanh(given)).double()

    return sampler.sample_rcm(model, x, sigmas, {"seed": 7}, disable=True, **more)


@pytest.mark.parametrize(("steps", "sigma_max"), [(4, 80.0), (3, 200.0)])
def test_two_samplers_with_split_sigmas_give_the_video_of_one(
    steps: int, sigma_max: float
) -> None:
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


def test_a_split_of_another_nodes_sigmas_does_not_repeat_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sigmas, noises = torch.tensor([1.0, 0.96, 0.9, 0.8, 0.5, 0.0]), []
    step = sampler.ops.denoise_step

    def spy(state: Any, velocity: Any, noise: Any, coefficients: Any) -> torch.Tensor:
        noises.append(noise)
        return step(state, velocity, noise, coefficients)

    monkeypatch.setattr(sampler.ops, "denoise_step", spy)
    x = torch.randn(1, 1, 1, 4, 4)
    rcm_run(sigmas[3:], rcm_run(sigmas[:4], x))
    drawn = [noise for noise in noises if noise is not None]
    assert len(drawn) == 4
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    # The first of them are those of a sampler that was given all sigmas.
    first = noise_stream(7, "rcm-renoise")
    assert all(torch.equal(a, torch.randn(a.shape, generator=first)) for a in drawn[:3])


def test_the_sampler_node(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, comfy={}, comfy__samplers={"KSAMPLER": lambda *args: args})
    made, sigmas = Sampler().make(4, 80.0, "sde")
    assert made == (sampler.sample_rcm, {"sampler": "sde", "steps": 4, "sigma_max": 80.0})
    assert sigmas.dtype == torch.float32 and sigmas.shape == (5,) and sigmas[-1] == 0
    assert float(sigmas[0]) == pytest.approx(80 / 81)


# --- what is shipped ---------------------------------------------------------------------------


def test_nodes_say_what_comfyui_asks_for() -> None:
    assert set(nodes.NODE_CLASS_MAPPINGS) == set(nodes.NODE_DISPLAY_NAME_MAPPINGS)
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        assert callable(getattr(node, node.FUNCTION)) and node.RETURN_TYPES and node.CATEGORY


def test_the_example_workflow_fits_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, folder_paths={"get_filename_list": lambda kind: []})
    workflow = json.loads(
        (NODES / "example_workflows" / "turbo_wan_t2v.json").read_text(encoding="utf-8")
    )
    used = {node["class_type"] for node in workflow.values()}
    assert set(nodes.NODE_CLASS_MAPPINGS) <= used
    for node in workflow.values():
        for value in node["inputs"].values():
            assert not isinstance(value, list) or value[0] in workflow
        ours = nodes.NODE_CLASS_MAPPINGS.get(node["class_type"])
        if ours is not None:
            assert set(node["inputs"]) == set(ours.INPUT_TYPES()["required"])


def test_nodes_import_without_comfyui() -> None:
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.integrations.comfyui import load_nodes\n"
        "load_nodes('nodes_of_their_own')\n"
        "assert not any(name.split('.')[0] in ('comfy', 'folder_paths') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)


def test_a_checkout_of_comfyui(pytestconfig: pytest.Config) -> None:
    path = pytestconfig.getoption("--comfyui")
    if path is None:
        pytest.skip("needs --comfyui=PATH, a checkout of ComfyUI")
    script = Path(__file__).with_name("comfyui_checkout.py")
    done = subprocess.run(
        [sys.executable, script, path], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
