"""One tree of errors, each also a built-in, each with what, expected, got and remedy."""

from __future__ import annotations

import pytest

from turbo_rcm_patch import errors
from turbo_rcm_patch.errors import TurboRCMError

LEAVES = [getattr(errors, name) for name in errors.__all__]
BRANCHES = {errors.TurboRCMError, errors.PatchError, errors.OpError, errors.SamplingError}


@pytest.mark.parametrize("error", LEAVES, ids=lambda e: e.__name__)
def test_every_error_is_documented_and_says_what_came_and_what_to_do(error) -> None:
    """A leaf is also a built-in, so that `except ValueError` keeps working."""
    assert issubclass(error, TurboRCMError) and error.__doc__
    builtin = (ValueError, RuntimeError, TypeError, OSError, ImportError)
    assert error in BRANCHES or issubclass(error, builtin)
    raised = error("q.dtype", expected="bf16", got="int64", remedy="Cast it")
    assert str(raised) == "q.dtype; expected bf16; got int64. Cast it."
    assert raised.block().splitlines() == [
        f"{error.__name__}: q.dtype", "  expected: bf16", "  got:      int64",
        "  remedy:   Cast it",
    ]  # fmt: skip


def test_message_leaves_out_what_is_not_given() -> None:
    assert str(TurboRCMError("It broke.")) == "It broke."
    assert str(TurboRCMError("It broke", remedy="Mend it.")) == "It broke. Mend it."
