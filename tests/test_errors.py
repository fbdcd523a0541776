"""One tree of errors, each also a built-in, each with what, expected, got and remedy."""

from __future__ import annotations

import pytest

from turbo_rcm_patch import errors
from turbo_rcm_patch.errors import TurboRCMError

LEAVES = [getattr(errors, name) for name in errors.__all__]
BRANCHES = {errors.TurboRCMError, errors.PatchError, errors.OpError, errors.SamplingError}


def test_all_lists_every_error_of_the_module() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("error", LEAVES, ids=lambda e: e.__name__)
def test_every_error_is_in_the_tree_and_documented(error: type[TurboRCMError]) -> None:
    assert issubclass(error, TurboRCMError)
    assert error.__doc__


@pytest.mark.parametrize(
    "error", [e for e in LEAVES if e not in BRANCHES], ids=lambda e: e.__name__
)
def test_every_leaf_is_also_a_built_in(error: type[TurboRCMError]) -> None:
    builtin = (ValueError, RuntimeError, TypeError, OSError, ImportError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize("error", LEAVES, ids=lambda e: e.__name__)
def test_message_says_what_was_expected_what_came_and_what_to_do(
    error: type[TurboRCMError],
) -> None:
    raised = error("q.dtype", expected="bf16", got="int64", remedy="Cast it")
    assert str(raised) == "q.dtype; expected bf16; got int64. Cast it."
    assert (raised.what, raised.expected, raised.got, raised.remedy) == (
        "q.dtype",
        "bf16",
        "int64",
        "Cast it",
    )


def test_message_leaves_out_what_is_not_given() -> None:
    assert str(TurboRCMError("It broke.")) == "It broke."
    assert str(TurboRCMError("It broke", remedy="Mend it.")) == "It broke. Mend it."
