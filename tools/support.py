"""Write the support matrix: the registered classes with the pairs of their published models, and
the capabilities that tests prove for every class.

    python -m tools.support docs/support.md

replaces the generated part of the page. A mark is a claim that a test backs: tests/test_support.py
compares every mark with the tests that carry `pytest.mark.supports(class, capability)`, and the
page with this script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from turbo_rcm_patch.config import Kind
from turbo_rcm_patch.patching import find_pairs


@dataclass(frozen=True, slots=True)
class Published:
    """A model that can be downloaded.

    Attributes:
        name: As its authors call it.
        config: Arguments of its class.
        kinds: The kinds of pairs of one block, for a class that is run from a checkout and cannot
            be built here.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ()

    def build(self, cls: str) -> nn.Module:
        """Return the network on torch's current default device.

        Args:
            cls: "module.Class", a key of `PUBLISHED`.
        """
        module, _, name = cls.rpartition(".")
        made: nn.Module = getattr(import_module(module), name)(**self.config)
        return made


_SMALL: Final = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
_14B: Final = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_IMAGE: Final = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_TI2V: Final = {
    "num_attention_heads": 24,
    "num_layers": 30,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
}
_5B: Final = {
    "num_attention_heads": 48,
    "num_layers": 42,
    "use_rotary_positional_embeddings": True,
}
_LEARNED: Final = {"in_channels": 32, "use_learned_positional_embeddings": True}
_1_5: Final = {"patch_size_t": 2, "patch_bias": False, "sample_frames": 81}
_DIFFUSERS: Final = "diffusers.models.transformers."

#: Key of the registry -> its published models, by the entries of their config.json that differ
#: from the class's defaults and matter to its pairs.
PUBLISHED: Final[dict[str, tuple[Published, ...]]] = {
    f"{_DIFFUSERS}transformer_wan.WanTransformer3DModel": (
        Published("Wan 2.1 T2V 1.3B", _SMALL),
        Published("Wan 2.1 T2V 14B", _14B),
        Published("Wan 2.1 I2V 14B", _14B | _IMAGE),
        Published("Wan 2.1 FLF2V 14B", _14B | _IMAGE | {"pos_embed_seq_len": 514}),
        Published("each expert of Wan 2.2 T2V A14B", _14B),
        Published("each expert of Wan 2.2 I2V A14B", _14B | {"in_channels": 36}),
        Published("Wan 2.2 TI2V 5B", _TI2V),
        Published("FastWan 2.2 TI2V 5B with full attention", _TI2V),
        Published("Lucy Edit 5B", _TI2V | {"in_channels": 96}),
    ),
    f"{_DIFFUSERS}transformer_wan_vace.WanVACETransformer3DModel": (
        Published("Wan 2.1 VACE 1.3B", _SMALL | {"vace_layers": list(range(0, 30, 2))}),
        Published("Wan 2.1 VACE 14B", _14B | {"vace_layers": list(range(0, 40, 5))}),
    ),
    f"{_DIFFUSERS}transformer_wan_animate.WanAnimateTransformer3DModel": (
        Published("Wan 2.2 Animate 14B", _14B | {"added_kv_proj_dim": 5120}),
    ),
    f"{_DIFFUSERS}transformer_chronoedit.ChronoEditTransformer3DModel": (
        Published("ChronoEdit 14B", _14B | _IMAGE),
    ),
    f"{_DIFFUSERS}transformer_skyreels_v2.SkyReelsV2Transformer3DModel": (
        Published("SkyReels-V2 DF 1.3B", _SMALL | {"inject_sample_info": True}),
        Published("SkyReels-V2 T2V 14B", _14B),
        Published("SkyReels-V2 I2V 14B", _14B | _IMAGE),
    ),
    f"{_DIFFUSERS}transformer_anyflow.AnyFlowTransformer3DModel": (
        Published("AnyFlow T2V 1.3B", _SMALL),
        Published("AnyFlow T2V 14B", _14B),
    ),
    f"{_DIFFUSERS}transformer_anyflow_far.AnyFlowFARTransformer3DModel": (
        Published("AnyFlow FAR 1.3B", _SMALL),
        Published("AnyFlow FAR 14B", _14B),
    ),
    f"{_DIFFUSERS}cogvideox_transformer_3d.CogVideoXTransformer3DModel": (
        Published("CogVideoX 2B"),
        Published("CogVideoX 5B", _5B),
        Published("CogVideoX 5B I2V", _5B | _LEARNED),
        Published("CogVideoX 1.5 5B", _5B | _1_5),
        Published("CogVideoX 1.5 5B I2V", _5B | _1_5 | {"in_channels": 32, "ofs_embed_dim": 512}),
    ),
    f"{_DIFFUSERS}consisid_transformer_3d.ConsisIDTransformer3DModel": (
        Published("ConsisID", _5B | _LEARNED | {"is_train_face": True}),
    ),
    "WanModel": (
        Published("a block", kinds=("self", "cross", "feed-forward")),
        Published("a block of Wan 2.1 I2V", kinds=("self", "cross", "image", "feed-forward")),
        Published("one with SLA or SageSLA", kinds=("self", "self", "cross", "feed-forward")),
    ),
    "turbo_rcm_patch.models.RCMAttention": (
        Published("a module of this library", {"dim": 128, "num_heads": 2}),
    ),
}  # fmt: skip


#: "yes": proven by a test on a CPU, where the reference or Triton's interpreter runs in place of
#: the kernels. "gpu": proven by a test that needs a GPU. "left" (to the author's code) and
#: "refused" happen instead, proven on a CPU. "no": not tested. "-": the class has no such thing.
Mark = Literal["yes", "gpu", "left", "refused", "no", "-"]

_SIGNS: Final[dict[Mark, str]] = {"yes": "✓", "gpu": "GPU", "no": "", "-": "–"}

#: Class, without its module -> head of its column.
CLASSES: Final = {
    "WanTransformer3DModel": "Wan",
    "WanVACETransformer3DModel": "VACE",
    "WanAnimateTransformer3DModel": "Animate",
    "ChronoEditTransformer3DModel": "ChronoEdit",
    "SkyReelsV2Transformer3DModel": "SkyReels-V2",
    "AnyFlowTransformer3DModel": "AnyFlow",
    "AnyFlowFARTransformer3DModel": "AnyFlow FAR",
    "CogVideoXTransformer3DModel": "CogVideoX",
    "ConsisIDTransformer3DModel": "ConsisID",
    "WanModel": "TurboDiffusion",
    "RCMAttention": "RCMAttention",
}

#: Capability -> a mark for each of `CLASSES`, in their order.
CAPABILITIES: Final = {
    "self-attention":        "yes yes yes  yes yes yes yes  yes      yes  yes yes",
    "cross-attention":       "yes yes yes  yes yes yes yes  -        -    yes -",
    "image branch":          "yes yes yes  yes yes -   -    -        -    yes -",
    "feed-forward":          "yes yes yes  yes yes yes yes  yes      yes  yes -",
    "faces":                 "-   -   left -   -   -   -    -        left -   -",
    "int8 Linears":          "yes yes yes  yes yes yes yes  yes      yes  yes no",
    "SLA":                   "yes yes yes  yes yes -   -    -        -    yes -",
    "attention mask":        "-   -   -    -   no  -   left -        -    -   -",
    "gate per token":        "yes -   -    no  no  yes yes  -        -    -   -",
    "fused QKV":             "yes no  no   no  no  -   -    yes      no   -   -",
    "LoRA":                  "yes no  no   no  no  yes yes  yes      no   no  no",
    "training":              "yes no  no   no  no  yes no   yes      no   no  no",
    "torch.compile":         "yes no  no   no  no  yes yes  yes      no   no  no",
    "FirstBlockCache, SeaCache": "yes no  -    -   -   -   -    yes      -    -   -",
    "PAB, FasterCache":      "yes no  no   no  no  no  no   yes      -    -   -",
    "offloading, casting":   "yes no  no   no  no  yes yes  yes      no   -   -",
    "context parallel":      "yes no  no   yes no  -   -    no       no   no  -",
    "CFG parallel":          "yes yes no   no  no  -   -    yes      no   -   -",
    "the guard":             "yes yes yes  yes yes yes yes  yes      yes  yes yes",
    "unpatched, bit-equal":  "yes yes yes  yes yes yes yes  yes      yes  yes yes",
    "its pipeline":          "yes yes yes  yes yes yes yes  yes      yes  -   -",
    "rCM sampler":           "yes yes yes  no  no  -   -    refused  -    -   -",
    "compare":               "yes yes yes  yes yes no  no   yes      yes  -   -",
    "Triton kernels":        "gpu gpu gpu  gpu gpu gpu gpu  gpu      gpu  no  gpu",
    "full size":             "gpu gpu gpu  gpu gpu gpu gpu  gpu      gpu  gpu -",
}  # fmt: skip

_LEGEND: Final = (
    "✓ is proven by tests on a CPU, GPU by tests that need one; left (to the author's code) and "
    "refused say what happens instead. An empty field was not tested; – is what the class does "
    "not have. Every sign has its tests: `grep -rn supports tests`."
)

#: The marks around the generated part of a page.
BEGIN: Final = "<!-- generated: python -m tools.support docs/support.md -->"
END: Final = "<!-- end of what is generated -->"


def marks() -> dict[tuple[str, str], Mark]:
    """Return the mark of every (class, capability).

    Raises:
        ValueError: A line has fewer or more marks than there are classes.
    """
    return {
        (name, capability): cast("Mark", mark)
        for capability, line in CAPABILITIES.items()
        for name, mark in zip(CLASSES, line.split(), strict=True)
    }


def text() -> str:
    """Return the generated part: the published models with their pairs, and the matrix."""
    return f"{_models()}\n\n{matrix()}\n\n{_LEGEND}\n"


def short_name(cls: str) -> str:
    """Return the class of a key of `PUBLISHED`, without its module."""
    return cls.rpartition(".")[2]


def count_pairs(cls: str, model: Published) -> tuple[int, int]:
    """Return how many pairs of a published model are fused, and how many are left as written."""
    if model.kinds:
        return len(model.kinds), 0
    with torch.device("meta"):
        table = find_pairs(model.build(cls))
    return table.fused, len(table) - table.fused


def _models() -> str:
    rows = [("class", "pairs fused")]
    rows += [(f"`{short_name(cls)}`", _counts(cls, models)) for cls, models in PUBLISHED.items()]
    return _table(rows)


def _counts(cls: str, models: Sequence[Published]) -> str:
    """Return "a, b: 90; c: 120 and 15 left", models with equal counts together."""
    names: dict[tuple[int, int], list[str]] = {}
    for model in models:
        names.setdefault(count_pairs(cls, model), []).append(model.name)
    return "; ".join(
        f"{', '.join(equal)}: {fused}" + (f" and {left} left" if left else "")
        for (fused, left), equal in names.items()
    )


def matrix() -> str:
    """Return a table of capabilities and classes, below it what is equal for all that have it."""
    found, equal = marks(), dict[Mark, list[str]]()
    rows: list[tuple[str, ...]] = [("", *CLASSES.values())]
    for capability in CAPABILITIES:
        row = [found[name, capability] for name in CLASSES]
        if len(kinds := {*row} - {"-"}) == 1:
            equal.setdefault(kinds.pop(), []).append(capability)
        else:
            rows.append((capability, *[_SIGNS.get(mark, mark) for mark in row]))
    below = (
        f"{_SIGNS.get(mark, mark)} in every class that has it: {'; '.join(names)}."
        for mark, names in equal.items()
    )
    return "\n\n".join((_table(rows), *below))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table that reads well as text and as Markdown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)).rstrip() + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def replaced(page: str) -> str:
    """Return a page with its generated part replaced.

    Raises:
        ValueError: It has no marks around one.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expected a page with the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text()}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replace the generated part of a page.")
    parser.add_argument("page", type=Path)
    path = parser.parse_args().page
    path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")
