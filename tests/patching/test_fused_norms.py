"""A skip and the next branch's norm in one pass: the same bits as two, and two wherever somebody
else stands between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.patching import cogvideox, sla, wan, wan_family
from tests.patching.turbodiffusion import tiny, tiny_inputs, with_sparse
from turbo_rcm_patch import PatchConfig, patch_model, patched
from turbo_rcm_patch.ops.elementwise import skip_norm
from turbo_rcm_patch.ops.streams import skip_norm_both
from turbo_rcm_patch.patching import linears
from turbo_rcm_patch.patching.linears import Close, StreamsClose
from turbo_rcm_patch.patching.record import record_of

BF16 = torch.bfloat16
WAN = wan.CASES[0]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The widths of streams whose norm ran with a skip; products are the library's, as on a
    GPU."""
    found: list[int] = []

    def counted(residual: torch.Tensor, *args: Any) -> Any:
        found.append(residual.shape[2])
        return skip_norm(residual, *args)

    monkeypatch.setattr(linears, "closes_apart", lambda like, impl: True)
    monkeypatch.setattr(linears, "skip_norm", counted)

    def both(branch: torch.Tensor, *args: Any) -> Any:
        found.extend([branch.shape[2]] * 2)
        return skip_norm_both(branch, *args)

    monkeypatch.setattr(linears, "skip_norm_both", both)
    yield found


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every norm is a pass of its own."""
    for kind in (Close, StreamsClose):
        monkeypatch.setattr(kind, "precede", lambda self, norm: False)


def family(name: str) -> Any:
    return next(one for one in wan_family.FAMILIES if one.name == name)


class Turbo:
    """TurboDiffusion's blocks as a subject."""

    def __init__(self, sparse: bool) -> None:
        self.name, self._sparse = f"turbodiffusion{'-sla' * sparse}", sparse

    def model(self, dtype: torch.dtype) -> Any:
        made = tiny(layers=2).to(dtype)
        return with_sparse(made).to(dtype) if self._sparse else made

    def inputs(self, batch: int, dtype: torch.dtype) -> dict[str, Any]:
        return tiny_inputs(batch=batch, dtype=dtype)


class SLA:
    """Sparse-linear attention in Wan's blocks."""

    name = "wan-sla"

    def model(self, dtype: torch.dtype) -> Any:
        return sla.with_sla(sla.T2V.model(dtype))

    def inputs(self, batch: int, dtype: torch.dtype) -> dict[str, Any]:
        return sla.inputs_of(sla.T2V, dtype, batch)


#: Subjects, and how many times a norm of a stream runs with its skip in a forward.
SUBJECTS: list[tuple[Any, int]] = [
    (WAN, 4), (wan.CASES[1], 4), (wan.CASES[2], 2), (wan.CASES[3], 4), (wan.CASES[4], 4),
    (SLA(), 4), (family("vace"), 9), (family("skyreels-forcing"), 4),
    (Turbo(False), 4), (Turbo(True), 4), (cogvideox.CASES[0], 4), (cogvideox.ROTARY, 4),
]  # fmt: skip


@torch.no_grad()
def forward(model: Any, given: dict[str, Any]) -> torch.Tensor:
    made = model(**given)
    out: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return out


@pytest.mark.parametrize("residual", ["fp32", "model"])
@pytest.mark.parametrize(("subject", "count"), SUBJECTS, ids=lambda s: getattr(s, "name", ""))
def test_one_pass_gives_the_bits_of_two(
    subject: Any,
    count: int,
    residual: str,
    joined: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given = subject.model(BF16), subject.inputs(2, BF16)
    how: dict[str, Any] = {"guard": False, "pv": "bf16", "residual": residual}
    if isinstance(subject, SLA):
        how["sla_topk"] = sla.TOPK
    with patched(model, **how):
        once = forward(model, given)
        assert len(joined) == count
        again = forward(model, given)
    apart(monkeypatch)
    with patched(model, **how):
        twice = forward(model, given)
    assert len(joined) == 2 * count
    assert torch.equal(once, twice) and torch.equal(again, twice)


def test_int8_linears_of_two_streams(joined: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their skips are passes of their own everywhere; those of one stream are in the product."""
    found = []
    for subject, count in ((cogvideox.ROTARY, 4), (WAN, 0)):
        model, given = subject.model(BF16), subject.inputs(2, BF16)
        with patched(model, guard=False, linear="int8"):
            found.append(forward(model, given))
        assert len(joined) == count
        joined.clear()
    apart(monkeypatch)
    for subject, out in zip((cogvideox.ROTARY, WAN), found, strict=True):
        model, given = subject.model(BF16), subject.inputs(2, BF16)
        with patched(model, guard=False, linear="int8"):
            assert torch.equal(forward(model, given), out)


def calls(module: torch.nn.Module) -> list[torch.Tensor]:
    """What a module gets from here on."""
    seen: list[torch.Tensor] = []
    module.register_forward_hook(lambda module, args, output: seen.append(args[0].clone()))
    return seen


@pytest.mark.parametrize("name", ["norm2", "norm3"])
def test_a_hooked_norm_is_called_with_the_stream(name: str, joined: list[int]) -> None:
    model, given = WAN.model(BF16), WAN.inputs(2, BF16)
    patch_model(model, PatchConfig(guard=False))
    before = forward(model, given)
    assert len(joined) == 4
    seen = calls(getattr(model.blocks[0], name))
    joined.clear()
    hooked = forward(model, given)
    assert len(joined) == 3 and len(seen) == 1
    assert wan.relative(hooked, before) < 2e-2  # The norm's input was rounded for it.
    joined.clear()
    forward(model, given)
    assert len(joined) == 3 and len(seen) == 2


def test_what_makes_the_coefficients_of_streams_is_called_after_the_skip(
    joined: list[int],
) -> None:
    """A LoRA may return other strides every time, which only a norm of its own looks at."""
    model, given = cogvideox.ROTARY.model(BF16), cogvideox.ROTARY.inputs(2, BF16)
    wan.with_lora(model.transformer_blocks[0], "norm2.linear")
    model.to(BF16)
    with patched(model, guard=False):
        forward(model, given)
    assert len(joined) == 2, "those of the other block"


def test_a_branch_of_its_author_s_gets_the_rounded_stream(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a dropout is active, for as long as it is."""
    model, given = WAN.model(BF16), WAN.inputs(2, BF16)
    dropout = model.blocks[0].attn2.to_out[1]
    dropout.p = 0.5
    found = []
    for counts in ((4, 2, 4), (0, 0, 0)):
        with patched(model, guard=False):
            for training, count in zip((False, True, False), counts, strict=True):
                dropout.train(training)
                torch.manual_seed(3)
                found.append(forward(model, given))
                assert len(joined) == count
                joined.clear()
        apart(monkeypatch)
    assert all(map(torch.equal, found[:3], found[3:]))


@pytest.mark.parametrize("linear", ["as-is", "int8"])
@pytest.mark.parametrize("target", ["attn1.to_out.0", "attn2.to_out.0", "attn2.to_q", "ffn.net.2"])
@pytest.mark.parametrize("subject", [WAN, cogvideox.ROTARY], ids=["wan", "cogvideox"])
def test_a_lora_is_called_and_its_skip_takes_the_norm_along(
    subject: Any, target: str, linear: str, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an int8 Linear the norm gives int8 rows."""
    model, given = subject.model(BF16), subject.inputs(2, BF16)
    block, count = (model.blocks if subject is WAN else model.transformer_blocks)[0], 4
    if subject is not WAN:
        target = {"attn2.to_q": "attn1.to_q", "ffn.net.2": "ff.net.2"}.get(target, target)
        if "attn2" in target:
            pytest.skip("it has none")
    elif linear == "int8":  # Elsewhere the product closes the skip.
        count = 1 if "to_out" in target else 0
    patch_model(model, PatchConfig(guard=False, linear=linear))
    forward(model, given)
    wan.with_lora(block, target)
    model.to(BF16)
    forward(model, given)
    joined.clear()
    once = forward(model, given)
    assert len(joined) == count
    joined.clear()
    apart(monkeypatch)
    for module in model.modules():  # Anything that makes other plans.
        module.anew = True
    assert torch.equal(forward(model, given), once) and not joined


@pytest.mark.parametrize(
    ("name", "left"), [("attn1", 1), ("attn2", 0), ("ffn", 1)], ids=["self", "cross", "ffn"]
)
def test_a_pair_given_back_parts_them(
    name: str, left: int, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its author's norm and sum run, with the stream rounded for them."""
    model, given = WAN.model(BF16), WAN.inputs(2, BF16)
    found = []
    for _ in range(2):
        with patched(model, guard=False):
            forward(model, given)
            record = record_of(model)
            assert record is not None
            for state in record.plan.states:
                if state.pair.path.endswith(name):
                    state.give_back("asked to")
            joined.clear()
            found.append(forward(model, given))
        if len(found) == 1:
            assert len(joined) == 2 * left
            apart(monkeypatch)
    assert torch.equal(*found) and not joined


def test_the_guard_compares_pairs_one_at_a_time(
    joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = WAN.model(BF16), WAN.inputs(2, BF16)
    found, numbers = [], []
    for _ in range(2):
        with patched(model, guard=True, fidelity=1.1) as report:
            found.append(forward(model, given))
            assert not joined, "a compared pair is closed alone"
            found.append(forward(model, given))
            numbers.append([one.error for one in report.guard])
        # On the second one the guard looks again at a pair whose heads it chose.
        assert len(joined) == (2 if len(found) == 2 else 0)
        joined.clear()
        apart(monkeypatch)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert numbers[0] == numbers[1] and len(numbers[0]) >= 6


def test_gradients_run_two_passes(joined: list[int]) -> None:
    model, given = WAN.model(BF16), WAN.inputs(1, BF16)
    given["hidden_states"].requires_grad_()
    with patched(model, guard=False, attention="exact"):
        model(**given)[0].float().square().sum().backward()
    assert not joined and given["hidden_states"].grad.abs().sum() > 0


def test_threads_do_not_meet_each_other_s_rows(joined: list[int]) -> None:
    model = WAN.model(BF16)
    patch_model(model, PatchConfig(guard=False))
    inputs = [WAN.inputs(1, BF16) for _ in range(4)]
    for index, given in enumerate(inputs):
        given["hidden_states"] = given["hidden_states"] * (index + 1)
    expected = [forward(model, given) for given in inputs]
    found: list[Any] = [None] * len(inputs)

    def run(index: int) -> None:
        for _ in range(3):
            found[index] = forward(model, inputs[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, expected)) and len(joined) == 4 * 4 * 4
