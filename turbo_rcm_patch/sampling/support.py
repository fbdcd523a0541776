"""What is supported: the registered classes with the pairs of their published models, and for
every class what was proven with it.

A mark is a claim that a test backs: tests/test_support.py compares every mark with the tests that
carry `pytest.mark.supports(class, capability)`, and docs/support.md with what is printed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, cast, get_args

from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.output import atomic
from turbo_rcm_patch.sampling.published import PUBLISHED, Published, count_pairs, short_name

__all__ = ["BEGIN", "CLASSES", "END", "GROUPS", "Mark", "marks", "matrix", "replace_in", "text"]

#: "yes": proven by a test on a CPU, where the reference or Triton's interpreter runs in place of
#: the kernels. "gpu": proven by a test that needs a GPU. "exact", "left" (to the author's code)
#: and "refused": what happens instead, proven on a CPU. "untested": nothing is claimed. "-": the
#: class has no such thing.
Mark = Literal["yes", "gpu", "exact", "left", "refused", "untested", "-"]

_SIGNS: Final[dict[Mark, str]] = {"yes": "✓", "gpu": "GPU", "untested": "not tested", "-": "–"}

#: Class, without its module -> head of its column.
CLASSES: Final = {
    "WanTransformer3DModel": "Wan",
    "WanVACETransformer3DModel": "VACE",
    "WanAnimateTransformer3DModel": "Animate",
    "ChronoEditTransformer3DModel": "ChronoEdit",
    "SkyReelsV2Transformer3DModel": "SkyReels-V2",
    "CogVideoXTransformer3DModel": "CogVideoX",
    "ConsisIDTransformer3DModel": "ConsisID",
    "WanModel": "TurboDiffusion",
    "RCMAttention": "RCMAttention",
}

#: Group -> capability -> a mark for each of `CLASSES`, in their order.
GROUPS: Final = {
    "fused": {
        "self-attention":    "yes yes  yes  yes  yes  yes yes  yes yes",
        "cross-attention":   "yes yes  yes  yes  yes  -   -    yes -",
        "image branch":      "yes yes  yes  yes  yes  -   -    yes -",
        "feed-forward":      "yes yes  yes  yes  yes  yes yes  yes -",
        "control, faces":    "-   yes  left -    -    -   left -   -",
        "int8 Linears":      "yes yes  yes  yes  yes  yes yes  yes yes",
        "SLA":               "yes yes  yes  yes  yes  -   -    yes -",
        "attention mask":    "-   -    -    -    exact -  -    -   -",
        "gate per token":    "yes -    -    yes  yes  -   -    -   -",
        "fused QKV":         "yes yes  yes  yes  yes  yes yes  -   -",
    },
    "with": {
        "LoRA":              "yes yes  yes  yes  yes  yes yes  yes yes",
        "training":          "yes yes  yes  yes  yes  yes yes  yes yes",
        "torch.compile":     "yes yes  yes  yes  yes  yes yes  yes yes",
        "FirstBlockCache":   "yes yes  -    -    -    yes -    -   -",
        "PAB, FasterCache":  "yes yes  yes  yes  yes  yes -    -   -",
        "offloading, casting": "yes yes yes yes  yes  yes yes  -   -",
        "context parallel":  "refused refused refused refused refused refused refused refused -",
    },
    "proof": {
        "the guard":         "yes yes  yes  yes  yes  yes yes  yes yes",
        "unpatched, bit-equal": "yes yes yes yes yes  yes yes  yes yes",
        "its pipeline":      "yes yes  yes  yes  yes  yes untested - -",
        "rCM sampler":       "yes yes  yes  untested untested refused - - -",
        "generate, compare": "yes refused refused refused refused yes refused - -",
        "Triton kernels":    "gpu gpu  gpu  gpu  gpu  gpu gpu  gpu gpu",
        "full size":         "gpu gpu  gpu  gpu  gpu  gpu gpu  gpu -",
    },
}  # fmt: skip

_LEGEND: Final = (
    "✓ is proven by tests on a CPU, GPU by tests that need one; exact, left (to the author's "
    "code) and refused say what happens instead, proven on a CPU; – is what the class does not "
    "have. Every sign has its tests: `grep -rn supports tests`."
)

#: What stands around the generated part of a file.
BEGIN: Final = "<!-- generated: python -m turbo_rcm_patch support --write docs/support.md -->"
END: Final = "<!-- end of what is generated -->"


def marks() -> dict[tuple[str, str], Mark]:
    """The mark of every (class, capability).

    Raises:
        ValueError: A line has fewer or more marks than there are classes, or an unknown one.
    """
    found: dict[tuple[str, str], Mark] = {}
    for capabilities in GROUPS.values():
        for capability, line in capabilities.items():
            for name, mark in zip(CLASSES, line.split(), strict=True):
                if mark not in get_args(Mark):
                    raise ValueError(f"{capability}: {mark}")
                found[name, capability] = cast("Mark", mark)
    return found


def text() -> str:
    """The generated part: the published models with their pairs, and the matrix."""
    return f"{_models()}\n\n{matrix()}\n\n{_LEGEND}\n"


def _models() -> str:
    rows = [("class", "pairs fused")]
    rows += [(f"`{short_name(cls)}`", _counts(cls, models)) for cls, models in PUBLISHED.items()]
    return _table(rows)


def _counts(cls: str, models: Sequence[Published]) -> str:
    """ "a, b: 90; c: 120 and 15 left", models with equal counts together."""
    names: dict[tuple[int, int], list[str]] = {}
    for model in models:
        names.setdefault(count_pairs(cls, model), []).append(model.name)
    return "; ".join(
        f"{', '.join(equal)}: {fused}" + (f" and {left} left" if left else "")
        for (fused, left), equal in names.items()
    )


def matrix() -> str:
    """A table of capabilities and classes."""
    found = marks()
    rows: list[tuple[str, ...]] = [("", *CLASSES.values())]
    for group, capabilities in GROUPS.items():
        rows.append((f"**{group}**", *[""] * len(CLASSES)))
        for capability in capabilities:
            row = [found[name, capability] for name in CLASSES]
            rows.append((capability, *[_SIGNS.get(mark, mark) for mark in row]))
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well as text and as Markdown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)).rstrip() + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def replace_in(path: Path) -> None:
    """Write the generated part of a file again.

    Raises:
        ConfigError: The file cannot be read or has no place for it.
        OutputError: It cannot be written.
    """
    try:
        whole = path.read_text(encoding="utf-8")
        before, _, rest = whole.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            raise ConfigError("--write", expected=f"a file with {BEGIN} and {END}", got=str(path))
    except OSError as error:
        raise ConfigError(
            "--write", expected="a file that can be read", got=f"{path}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("--write", expected="a text in UTF-8", got=str(path)) from error
    made = f"{before}{BEGIN}\n\n{text()}\n{END}{after}"
    with atomic(path) as temporary:
        temporary.write_text(made, encoding="utf-8")
