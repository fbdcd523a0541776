"""A patched model whose kernels run in Triton's interpreter, in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patching.wan import CASES, Case, relative, run
from turbo_rcm_patch import patched
from turbo_rcm_patch.patching import branches

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

IMAGE = next(case for case in CASES if case.image)


@pytest.mark.parametrize("case", [CASES[0], IMAGE], ids=lambda case: case.name)
def test_exact_attention_of_a_block_is_two_launches_that_can_be_recorded(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around torch's attention, which cannot: the operation that holds all three would take
    Python on every forward."""
    calls: list[str] = []

    def counted(name: str) -> None:
        real: Any = getattr(branches, name)
        body = getattr(real, "body", real)

        def run_it(*args: Any) -> Any:
            calls.append(name)
            return body(*args)

        monkeypatch.setattr(branches, name, run_it)

    for name in ("rotated_heads", "attention_forward"):
        counted(name)
    model, given = case.model(), case.inputs()
    outputs = []
    for impl in ("reference", "triton"):
        calls.clear()
        with patched(model, attention="exact", guard=False, impl=impl):
            outputs.append(run(model, **given))
        attentions = len(model.blocks) * (3 if case.image else 2)
        whole, apart = calls.count("attention_forward"), calls.count("rotated_heads")
        assert (whole, apart) == ((attentions, 0) if impl == "reference" else (0, attentions))
    assert relative(outputs[1], outputs[0]) < 1e-5
