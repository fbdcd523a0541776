"""CogVideoX and ConsisID: pairs of two residual streams, and what comes out.

What holds for every family (the undo record, errors of patch_model) is tested with Wan; here is
what depends on the block.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)

from tests.patching.cogvideox import (
    BOTH_CLASSES,
    CASES,
    COGVIDEOX,
    CONSISID,
    ONE_EACH,
    ROTARY,
    Case,
    widened,
)
from tests.patching.wan import EXACT, INT8, dicts, relative, run
from turbo_rcm_patch import (
    PatchConfig,
    errors,
    find_pairs,
    ops,
    patch_model,
    patched,
    unpatch_model,
)
from turbo_rcm_patch.patching import blocks

BF16 = torch.bfloat16
EXACT_GUARDED = PatchConfig(attention="exact")
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EACH_CLASS = pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.name)


# --- which pairs there are -----------------------------------------------------------------------


@EVERY
@pytest.mark.supports(CONSISID, "control, faces")
def test_every_pair_is_listed_and_changes_nothing(case: Case) -> None:
    model = case.model()
    before = dicts(model)
    table = find_pairs(model)
    assert [pair.path for pair in table][:4] == [
        f"transformer_blocks.{i}.{name}" for i in (0, 1) for name in ("attn1", "ff")
    ]
    assert (table.fused, len(table)) == (4, 4 + case.as_written)
    assert {pair.path for pair in table[4:]} <= {"perceiver_cross_attention.0"}
    assert dicts(model) == before


def test_a_pair_has_two_streams() -> None:
    attention, feed_forward = find_pairs(ROTARY.model())[:2]
    assert (attention.kind, attention.heads, attention.head_dim) == ("self", 2, 64)
    assert (attention.cast, attention.projection, attention.runs) == ("model", True, "two-launch")
    assert [(s.name, s.c_skip, s.c_out) for s in attention.streams] == [
        ("text", "1", "enc_gate_msa"),
        ("video", "1", "gate_msa"),
    ]
    assert not attention.reason
    assert (feed_forward.kind, feed_forward.cast, feed_forward.runs) == (
        "feed-forward",
        "model",
        "in-linear",
    )
    assert [s.c_out for s in feed_forward.streams] == ["enc_gate_ff", "gate_ff"]
    lines = str(find_pairs(ROTARY.model()))
    assert "text: x + enc_gate_msa * F(x) | video: x + gate_msa * F(x)" in lines


#: Real configurations without their weights, and how many pairs are fused.
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "CogVideoX-2B": ({}, 60),
    "CogVideoX-5B": (
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        84,
    ),
    "CogVideoX1.5-5B-I2V": (
        {
            "num_attention_heads": 48,
            "num_layers": 42,
            "use_rotary_positional_embeddings": True,
            "in_channels": 32,
            "ofs_embed_dim": 512,
            "patch_size_t": 2,
            "patch_bias": False,
            "sample_frames": 81,
        },
        84,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_without_their_weights(name: str) -> None:
    config, fused = REAL[name]
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(**config)
    with patched(model) as report:
        assert report.fused == len(report.pairs) == fused
    assert {pair.head_dim for pair in report.pairs if pair.heads} == {64}


def test_one_launch_is_for_one_stream() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    report = patch_model(model, PatchConfig(form="one-launch", guard=False))
    assert report.pairs[0].runs == "two-launch"
    assert "one launch closes one residual stream" in report.pairs[0].reason
    assert relative(run(model, **inputs), expected) < 0.02


@pytest.mark.parametrize("kind", ["self", "feed-forward"])
def test_kinds_choose_what_is_fused(kind: Any) -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    with patched(model, PatchConfig(kinds=(kind,), attention="exact")) as report:
        assert relative(run(model, **inputs), expected) < 1e-5
        assert [pair.kind for pair in report.pairs if pair.fused] == [kind] * 2
        assert {record.path.split(".")[-1] for record in report.guard} == {
            "attn1" if kind == "self" else "ff"
        }
    left = [pair for pair in report.pairs if not pair.fused]
    assert all("PatchConfig.kinds" in pair.reason for pair in left)


# --- what comes out ------------------------------------------------------------------------------


@EVERY
def test_exact_attention_is_the_author_s_forward(case: Case) -> None:
    model, inputs = case.model(), case.inputs(batch=2)
    expected = run(model, **inputs)
    with patched(model, EXACT):
        assert relative(run(model, **inputs), expected) < 1e-5


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.supports(BOTH_CLASSES, "self-attention", "feed-forward")
@pytest.mark.supports(BOTH_CLASSES, "fused QKV")
def test_int8_stays_near_the_truth(case: Case, dtype: torch.dtype) -> None:
    truth_model, model = case.model(dtype).float(), case.model(dtype)
    inputs = case.inputs(dtype=dtype)
    truth = run(truth_model, **widened(inputs))
    unpatched = relative(run(model, **inputs), truth)
    with patched(model, INT8):
        output = run(model, **inputs)
    assert output.dtype == dtype
    error = relative(output, truth)
    assert 0 < error < 0.02
    if dtype == BF16:
        assert error < 2 * unpatched


@EVERY
@pytest.mark.supports(BOTH_CLASSES, "int8 Linears")
def test_int8_linears_stay_near_the_author_s_forward(case: Case) -> None:
    model, inputs = case.model(), case.inputs(batch=2)
    expected = run(model, **inputs)
    linear = PatchConfig(attention="exact", linear="int8", guard=False)
    with patched(model, linear) as report:
        assert 1e-3 < relative(run(model, **inputs), expected) < 0.02
        to_qkv = case.fuse_qkv and not case.unfuse
        qkv = ("to_qkv",) if to_qkv else ("to_q", "to_k", "to_v")
        assert report.pairs[0].int8_linears == (*qkv, "to_out.0")
        first = () if "activation_fn" in case.config else ("net.0.proj",)
        assert report.pairs[1].int8_linears == (*first, "net.2")


def test_int4_is_worse_than_int8_so_the_attention_reaches_the_output() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    truth = run(model, **inputs)
    found = {}
    for attention in ("exact", "int8", "int4"):
        with patched(model, PatchConfig(attention=attention, guard=False)):  # type: ignore[arg-type]
            found[attention] = relative(run(model, **inputs), truth)
    assert found["exact"] < 1e-5 < found["int8"] < found["int4"] / 4


def test_each_option_of_the_forward_reaches_the_output() -> None:
    """Else the comparisons above would not prove that ours honours it."""
    case = next(case for case in CASES if case.name == "1.5-i2v")
    model, inputs = case.model(), case.inputs()
    expected = run(model, **inputs)
    for change in ({"ofs": torch.full((1,), 900.0)}, {"image_rotary_emb": None}):
        assert relative(run(model, **{**inputs, **change}), expected) > 1e-3


# --- and back ------------------------------------------------------------------------------------


@EVERY
@pytest.mark.supports(BOTH_CLASSES, "unpatched, bit-equal")
def test_unpatch_leaves_nothing_behind(case: Case) -> None:
    model, inputs = case.model(), case.inputs()
    expected, before = run(model, **inputs), dicts(model)
    state = copy.deepcopy(model.state_dict())
    patch_model(model)
    assert dicts(model) != before
    run(model, **inputs)
    unpatch_model(model)
    assert dicts(model) == before
    assert torch.equal(run(model, **inputs), expected)
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_copies_of_a_patched_model_stand_alone() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    patch_model(model)
    run(model, **inputs)  # The guard chooses.
    fused = run(model, **inputs)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for parameter in model.parameters():
        parameter.data.zero_()
    for twin in twins:
        assert torch.equal(run(twin, **inputs), fused)
        unpatch_model(twin)
        assert torch.equal(run(twin, **inputs), expected)


# --- the guard -----------------------------------------------------------------------------------


@pytest.mark.supports(BOTH_CLASSES, "the guard")
@EACH_CLASS
def test_guard_compares_and_does_not_change_the_output(case: Case) -> None:
    model, inputs = case.model(), case.inputs()
    with patched(model, INT8):
        without = run(model, **inputs)
    report = patch_model(model, precision="fixed")
    assert torch.equal(run(model, **inputs), without)
    assert [record.verdict for record in report.guard] == ["kept"] * 4
    assert all(record.error < 0.05 for record in report.guard)


def test_over_budget_goes_back_to_the_author_s_code() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    report = patch_model(model, PatchConfig(attention="int4", guard_budget=1e-3))
    assert relative(run(model, **inputs), expected) < 1e-5
    assert [pair.kind for pair in report.pairs if pair.fused] == ["feed-forward"] * 2
    unpatch_model(model)
    assert torch.equal(run(model, **inputs), expected)


def test_auto_precision_makes_an_attention_exact() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    expected = run(model, **inputs)
    report = patch_model(model, PatchConfig(precision="auto", guard_budget=1e-4))
    assert relative(run(model, **inputs), expected) < 1e-5
    assert report.fused == 4 and "attention made exact" in report.pairs[0].reason


@pytest.mark.usefixtures("no_plans")
def test_each_stream_has_to_be_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text stream that is 20 % off is 5 % of both, because its tokens are few."""
    right = ops.project_skip_streams
    case = Case("few text tokens", {"max_text_seq_length": 7})

    def wrong(x: torch.Tensor, weight: torch.Tensor, *args: Any, **given: Any) -> Any:
        text, video = right(x, weight, *args, **given)
        if weight.shape[0] == weight.shape[1]:  # The attention's.
            before = given["residuals"][0]
            text = before + 1.2 * (text - before)
        return text, video

    monkeypatch.setattr(ops, "project_skip_streams", wrong)
    model, inputs = case.model(), case.inputs()
    report = patch_model(model, EXACT_GUARDED)
    run(model, **inputs)
    assert [pair.kind for pair in report.pairs if pair.fused] == ["feed-forward"] * 2
    assert report.guard[0].gain == pytest.approx(0.2, abs=1e-3)


def test_non_finite_input_is_named() -> None:
    model, inputs = ROTARY.model(), ROTARY.inputs()
    inputs["encoder_hidden_states"][0, 0, 0] = float("nan")
    patch_model(model)
    with pytest.raises(errors.NonFiniteInputError, match="encoder_hidden_states of the first"):
        run(model, **inputs)


@pytest.mark.parametrize("scheduler", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler])
@pytest.mark.supports(COGVIDEOX, "its pipeline")
def test_a_real_pipeline(scheduler: Any) -> None:
    """Neither scheduler counts its steps: the guard finds the last one all the same."""
    pipe = CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=ROTARY.model(),
        scheduler=scheduler(),
    )
    pipe.set_progress_bar_config(disable=True)
    text = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))

    def generate() -> torch.Tensor:
        latents: torch.Tensor = pipe(
            prompt_embeds=text,
            negative_prompt_embeds=torch.zeros_like(text),
            height=96,
            width=64,
            num_frames=9,
            num_inference_steps=3,
            guidance_scale=2.0,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames
        return latents

    expected = generate()
    with patched(pipe) as report:
        output = generate()
    first = report.pairs[0].path
    assert first == "transformer.transformer_blocks.0.attn1"
    seen = [
        (record.step, record.when)
        for record in report.guard
        if record.path == first and record.when in ("first", "last") and record.verdict == "kept"
    ]
    assert seen == [(0, "first"), (2, "last")]
    assert 0 < relative(output, expected) < 0.05
    assert torch.equal(generate(), expected)


def test_tables_of_one_capture_are_not_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the memory of that graph."""
    monkeypatch.setattr(blocks, "is_capturing", lambda device: True)
    tables, source = blocks.KeptTables(), torch.ones(3)
    made = []
    for _ in range(2):
        tables.begin()
        made += [tables.of((source,), lambda: (source * 2, source * 3)) for _ in range(2)]
    assert made[0] is made[1] is not made[2] is made[3]


def test_a_forward_says_that_it_begins_to_the_tables_of_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[blocks.KeptTables] = []
    monkeypatch.setattr(blocks.KeptTables, "begin", lambda self: begun.append(self))
    case = CASES[0]
    model = case.model()
    patch_model(model, attention="exact", guard=False)
    run(model, **case.inputs())
    assert len(begun) == 1
