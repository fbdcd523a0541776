"""Quiet loading with other libraries, and their errors in one sentence."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

from turbo_rcm_patch.errors import TurboRCMError
from turbo_rcm_patch.interrupts import reraise_interrupts

#: The form of a name on the model hub.
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@contextmanager
def loading(
    error: type[TurboRCMError], failed: str, *, expected: str, remedy: str = ""
) -> Iterator[None]:
    """Load something quietly, and raise a typed error where a library cannot.

    Args:
        error: Its class.
        failed: The beginning of its message; the library's words come after it.
        expected: As in `TurboRCMError`.
        remedy: As in `TurboRCMError`.
    """
    try:
        with reraise_interrupts(), quiet_loading():
            yield
    except (MemoryError, TurboRCMError):
        raise
    except Exception as why:
        message = f"{type(why).__name__}: {first_line(why)}"
        if _is_offline(why):
            failed = f"no connection to the model hub: {failed}"
        if str(why).startswith("Failed to import"):  # The files are not at fault.
            remedy = "Run `turbo-rcm-patch doctor`: it says which versions of the packages work"
        raise error(f"{failed} ({message})", expected=expected, remedy=remedy) from why


def _is_offline(error: BaseException | None) -> bool:
    """Return True if an error comes from a hub that cannot be reached."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None:
        if isinstance(error, LocalEntryNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the loaders' progress bars and advice. Restores their settings, and torch's default
    dtype, which diffusers leaves changed if it fails."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.simplefilter("ignore")
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        for log in (diffusers_logging, transformers_logging):
            if log.is_progress_bar_enabled():
                undo.callback(log.enable_progress_bar)
            undo.callback(log.set_verbosity, log.get_verbosity())
            log.disable_progress_bar()
            log.set_verbosity(logging.ERROR)
        yield


def first_line(error: BaseException) -> str:
    """Shorten another library's message to one line, without its advice to read files unsafely.

    Of an import that failed because of another, the last line says why.
    """
    text = str(error).strip()
    if "weights_only" in text:
        return "it holds more than weights, and was not executed"
    lines = text.splitlines() or ["no message"]
    return lines[-1 if lines[0].startswith("Failed to import") else 0][:200]
