"""How a model is patched: one frozen dataclass that validates itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any, Final, Literal, TypedDict, cast, get_args

from turbo_rcm_patch.errors import ConfigError

__all__ = [
    "Attention",
    "Form",
    "Impl",
    "Kind",
    "Linear",
    "PVDType",
    "PatchConfig",
    "PatchOptions",
    "Precision",
    "chosen_config",
    "is_number",
]

Attention = Literal["auto", "int8", "int4", "exact", "sage"]
PVDType = Literal["auto", "fp8", "bf16", "fp16"]
Precision = Literal["fixed", "auto"]
Linear = Literal["as-is", "int8"]
Impl = Literal["auto", "triton", "reference"]
Form = Literal["auto", "one-launch", "two-launch"]
Kind = Literal["self", "cross", "image", "feed-forward", "control"]

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """What `patch_model` does to a model.

    Attributes:
        attention: "auto" takes "int8" or "exact", whichever was measured to be faster on the
            device for the lengths of a call; on a GPU that was not measured int8 from 4,096 keys
            on, on a CPU int8. "int8" runs q and k in int8, but for cross-attention over fewer than
            1,024 keys (a prompt), which is exact: faster there, and nothing is lost. "exact" runs
            torch's scaled_dot_product_attention and fuses only the skip; "sage" calls the
            `sageattention` package; "int4" quantises q and k to 15 levels and exists to show that
            the verdict can fail.
        pv: Element type of probabilities and values in the second matrix product. "auto" is fp8
            (e4m3) from 4,096 keys on where the device has it (sm_89 and newer), else bf16: at
            shorter lengths the 16-bit product costs no time and is more accurate. Accumulation is
            fp32 in every case.
        linear: How the Linears of a fused pair run: q, k, v and output projection of attention,
            both of a feed-forward. "as-is" in the model's dtype; "int8" with int8 weights (a scale
            per output channel) and int8 activations (a scale per row), where a Linear is plain,
            has no gradient to give and multiplies nothing but its weight. Faster, less accurate,
            and never the default. Outside a compiled or captured graph the int8 weights are
            kept beside the model's own, which costs one byte more per weight, and every forward
            first compares the weights with what they were made from, bit by bit on the device; in
            a graph they are made again on every forward.
        smooth_k: Subtract the mean over tokens from k before quantising. It leaves softmax
            unchanged exactly.
        impl: "triton" or "reference" (plain torch); "auto" decides once, by the device of the
            model.
        form: How a pair with an output projection is closed: attention and projection in
            "two-launch" or "one-launch"; "auto" reads the measured table.
        kinds: Which kinds of skip pair are fused: "self" and "cross" attention, "image" (I2V's
            second attention), "feed-forward", "control" (VACE's input projection).
        guard: Compare each closed pair with its author's code on the first and the last step of
            an inference and give it back when it is over budget.
        precision: "fixed" runs every pair as asked for here, or not at all. "auto" lets the guard
            choose for each attention what keeps it within the budget: as asked for, with 16-bit p
            and v, with exact attention and the skip fused after it, or its author's code. It
            needs the guard and attention="auto" or "int8".
        guard_budget: Largest error of a pair that the guard accepts, as a share of what it adds
            to its residual: relative L2 of each sample; a head, the worst hundredth of the rows
            and the last keys have more room, the input of a branch has less
            (`patching/measure.py`).
        sla_topk: Share of the blocks of keys that sparse attention sees, in (0, 1], in a Wan class
            of diffusers whose self-attention holds SLA's `proj_l` (`load_extra` attaches it).
            TurboDiffusion's own class keeps the share of its modules. Without a `proj_l`
            attention is dense and this says nothing; `unload_extra` takes it away.
    """

    attention: Attention = "auto"
    pv: PVDType = "auto"
    linear: Linear = "as-is"
    smooth_k: bool = True
    impl: Impl = "auto"
    form: Form = "auto"
    kinds: tuple[Kind, ...] = KINDS
    guard: bool = True
    precision: Precision = "fixed"
    guard_budget: float = 0.10
    sla_topk: float = 0.1

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        chosen = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"PatchConfig({', '.join(chosen)})"

    def __post_init__(self) -> None:
        for field, choices in (
            ("attention", get_args(Attention)),
            ("pv", get_args(PVDType)),
            ("linear", get_args(Linear)),
            ("impl", get_args(Impl)),
            ("form", get_args(Form)),
            ("precision", get_args(Precision)),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise ConfigError(
                    f"PatchConfig.{field}", expected=f"one of {choices}", got=repr(value)
                )
        if (
            isinstance(self.kinds, str)
            or not isinstance(self.kinds, Collection)
            or not self.kinds
            or any(k not in KINDS for k in self.kinds)
        ):
            raise ConfigError(
                "PatchConfig.kinds",
                expected=f"a non-empty tuple out of {KINDS}",
                got=repr(self.kinds),
            )
        for field in ("smooth_k", "guard"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(
                    f"PatchConfig.{field}",
                    expected="True or False",
                    got=repr(getattr(self, field)),
                )
        if not is_number(self.guard_budget) or not 0.0 < self.guard_budget < float("inf"):
            raise ConfigError(
                "PatchConfig.guard_budget",
                expected="a positive relative L2 error",
                got=repr(self.guard_budget),
                remedy="Use guard=False to switch the guard off",
            )
        if not is_number(self.sla_topk) or not 0.0 < self.sla_topk <= 1.0:
            raise ConfigError(
                "PatchConfig.sla_topk",
                expected="a share of the blocks of keys, in (0, 1]",
                got=repr(self.sla_topk),
                remedy="Use unload_extra to run without SLA",
            )
        if self.precision == "auto" and not (self.guard and self.attention in ("auto", "int8")):
            raise ConfigError(
                'PatchConfig.precision="auto"',
                expected='guard=True and attention="auto" or "int8": the guard chooses',
                got=f"guard={self.guard} and attention={self.attention!r}",
            )


class PatchOptions(TypedDict, total=False):
    """The fields of `PatchConfig` as keywords of `patch_model` and `patched`."""

    attention: Attention
    pv: PVDType
    linear: Linear
    smooth_k: bool
    impl: Impl
    form: Form
    kinds: tuple[Kind, ...]
    guard: bool
    precision: Precision
    guard_budget: float
    sla_topk: float


def chosen_config(config: object, options: Mapping[str, object]) -> PatchConfig:
    """The configuration that somebody means by one, by keywords, or by both: a keyword replaces
    that field of the configuration.

    Raises:
        ConfigError: It is no `PatchConfig`, there is no such field, or a value is outside its
            domain.
    """
    if config is not None and not isinstance(config, PatchConfig):
        attention = config if config in get_args(Attention) else "int8"
        raise ConfigError(
            "config",
            expected="a PatchConfig",
            got=repr(config)[:120],
            remedy=f"Write patch_model(model, attention={attention!r}) or "
            f"patch_model(model, PatchConfig(attention={attention!r}))",
        )
    names = [field.name for field in fields(PatchConfig)]
    unknown = [name for name in options if name not in names]
    if unknown:
        near = get_close_matches(unknown[0], names, 1)
        raise ConfigError(
            f"keyword {unknown[0]!r}",
            expected="a field of PatchConfig: " + ", ".join(names),
            got=", ".join(unknown),
            remedy=f"Did you mean {near[0]!r}" if near else "",
        )
    return replace(config if config is not None else PatchConfig(), **cast("Any", dict(options)))


def is_number(value: object) -> bool:
    """Whether a value is a real number, which True and False are not meant as."""
    return isinstance(value, Real) and not isinstance(value, bool)
