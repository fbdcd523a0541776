"""Mutants of the parts that matter most: features that a sign of the support matrix stands for,
and what earlier looks found that no test noticed."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.mutants.automatic import ROOT

__all__ = ["OWN", "SIGNS", "Own"]

PACKAGE = "turbo_rcm_patch/"
BRANCHES, BLOCK = f"{PACKAGE}patching/branches.py", f"{PACKAGE}patching/block.py"
LINEARS, GUARD = f"{PACKAGE}patching/linears.py", f"{PACKAGE}patching/guard.py"
MEASURE, WAN = f"{PACKAGE}patching/measure.py", f"{PACKAGE}patching/families/wan_block.py"
COG = f"{PACKAGE}patching/families/cogvideox_block.py"
FRAMES = f"{PACKAGE}video/families/cogvideox.py"
DISPATCH, ATTENTION = f"{PACKAGE}ops/dispatch.py", f"{PACKAGE}ops/attention.py"
KERNELS = f"{PACKAGE}kernels/portable/"


@dataclass(frozen=True)
class Own:
    """One change of a text.

    Attributes:
        name: What is broken.
        file: Where.
        before: What is there, once.
        after: What is put in its place.
        tests: What has to notice, besides the fuzz; the tests of the file by default.
        capability: The row of the support matrix that this breaks: then only tests that carry the
            mark count, and they have to fail for each of `classes`.
        classes: Of that row; all that have it by default.
        fuzz: Whether the fuzz may notice it.
        interpreted: Whether it needs Triton's interpreter.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...] = ()
    capability: str = ""
    classes: tuple[str, ...] = ()
    fuzz: bool = True
    interpreted: bool = False

    def tree(self) -> ast.Module:
        """The tree of the changed file.

        Raises:
            ValueError: What is to be changed is not there, or more than once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: found {text.count(self.before)} times in {self.file}")
        return ast.parse(text.replace(self.before, self.after))


_MODE = 'mode: Mode = self._mode(branch, hidden, given) if state.live else "as-written"'
_END = "return (self.close(token, out, hidden, gate, given=given) if close else out), token\n"


def _not_fused(kind: str) -> str:
    return f'{_MODE}\n        mode = "as-written" if branch.kind == "{kind}" else mode'


_OF_SIGNS = ("tests/patching/test_signs.py",)
_WITH_IMAGE = ("WanTransformer3DModel", "WanVACETransformer3DModel",
               "WanAnimateTransformer3DModel", "ChronoEditTransformer3DModel",
               "SkyReelsV2Transformer3DModel", "WanModel")  # fmt: skip
_COG = ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel")
#: RCMAttention has a forward of its own.
_BLOCKS = (*_WITH_IMAGE, *_COG)

#: What signs stand for, broken: each cell has to fail.
SIGNS = [
    Own("self-attention is not fused", BLOCK, _MODE, _not_fused("self"), _OF_SIGNS,
        "self-attention", _BLOCKS),
    Own("self-attention is 3 % too loud", BRANCHES, _END,
        f"out = out * (1.03 if self._of_context is None else 1.0)\n        {_END}", _OF_SIGNS,
        "self-attention", _BLOCKS),
    Own("RCMAttention is 3 % too loud", f"{PACKAGE}patching/families/rcm_attention.py",
        "(qkv,), _ = project(None, x, x)",
        "(qkv,), _ = project(None, x, x)\n        qkv = qkv * 1.03",
        _OF_SIGNS, "self-attention", ("RCMAttention",)),
    Own("cross-attention is not fused", BLOCK, _MODE, _not_fused("cross"), _OF_SIGNS,
        "cross-attention", _WITH_IMAGE),
    Own("cross-attention sees one key less", BRANCHES,
        "            k, v = made[0].chunk(2, -1) if self._fused else made\n        way =",
        "            k, v = made[0].chunk(2, -1) if self._fused else made\n"
        "            k, v = k[:, :-1], v[:, :-1]\n        way =",
        _OF_SIGNS, "cross-attention", _WITH_IMAGE),
    Own("the image branch adds nothing", BRANCHES,
        "out = self._dense(token, q, k, v, norms, None, way, out)",
        "self._dense(token, q, k, v, norms, None, way, out)", _OF_SIGNS, "image branch",
        _WITH_IMAGE),
    Own("the image branch is not fused", BLOCK, _MODE,
        f'{_MODE}\n        mode = "as-written" if inner is not None else mode',
        _OF_SIGNS, "image branch", _WITH_IMAGE),
    Own("the feed-forward is not fused", BLOCK, _MODE, _not_fused("feed-forward"), _OF_SIGNS,
        "feed-forward", _BLOCKS),
    Own("the feed-forward is 3 % too loud", BRANCHES,
        "        return self.close(token, h, hidden, gate, given=given), token",
        "        return self.close(token, h * 1.03, hidden, gate, given=given), token", _OF_SIGNS,
        "feed-forward", _BLOCKS),
    Own("Linears of self-attention do not run in int8", BRANCHES,
        "like, like.dtype,\n            int8=int8,",
        "like, like.dtype,\n            int8=int8 and cross,",
        _OF_SIGNS, "int8 Linears", _BLOCKS),
    Own("no Linear runs in int8", LINEARS,
        "replace(pair, int8_linears=chosen, reason=reason), int8=True,",
        "replace(pair, int8_linears=chosen, reason=reason), int8=False,", _OF_SIGNS,
        "int8 Linears", (*_BLOCKS, "RCMAttention")),
    Own("separate projections are read where they are fused", WAN,
        'cross, fused = branch.kind == "cross", attn.fused_projections',
        'cross, fused = branch.kind == "cross", False', _OF_SIGNS, "fused QKV",
        _WITH_IMAGE[:5]),
    Own("CogVideoX reads separate projections where they are fused", COG,
        "fused = processor_class(attn.processor) is FusedCogVideoXAttnProcessor2_0",
        "fused = False", _OF_SIGNS, "fused QKV", _COG),
    Own("the guard keeps everything", GUARD,
        "over = found.error > self._budget", "over = found.error > 1e9",
        ("tests/patching/test_guard_mutants.py",), "the guard", (*_BLOCKS, "RCMAttention")),
]  # fmt: skip

#: What no test noticed once, and what matters most.
OWN = [
    Own("frames are dropped at the end, not at the front", FRAMES,
        "return latents[:, latents.shape[1] - _latent_frames(job.pipe, job.settings) :]",
        "return latents[:, : _latent_frames(job.pipe, job.settings)]",
        ("tests/video/test_cogvideox.py", "-k", "dropped"), fuzz=False),
    Own("dropped frames come back as zeros", FRAMES, "clean[:, :1].expand(",
        "torch.zeros_like(clean[:, :1]).expand(",
        ("tests/video/test_cogvideox.py", "-k", "dropped"), fuzz=False),
    Own("fp8 needs compute capability 9.0", DISPATCH, "capability >= (8, 9)",
        "capability >= (9, 0)", ("tests/ops/test_dispatch.py",), fuzz=False),
    Own("fp8 on compute capability 8.6", DISPATCH, "capability >= (8, 9)",
        "capability >= (8, 6)", ("tests/ops/test_dispatch.py",), fuzz=False),
    Own("masked_attention without sm_scale", ATTENTION,
        "                scale=sm_scale,\n            )\n    return out",
        "            )\n    return out",
        ("tests/ops/test_masked_attention.py",), fuzz=False),
    Own("the guard looks at the first sample only", MEASURE,
        "errors = [max(column) for column in zip(*values, strict=True)]",
        "errors = [max(column) for column in zip(*values, strict=True)][:1]",
        ("tests/patching/test_guard_mutants.py", "-k", "one-sample or record"), fuzz=False),
    Own("the guard's heads are not looked at", MEASURE,
        "if not heads or before is None:", "if True:",
        ("tests/patching/test_guard_mutants.py", "-k", "head"), fuzz=False),
    Own("the prologue's lengths are not clamped", f"{KERNELS}prologue.py",
        "limit = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + b), n_tokens)).to(tl.int32)",
        "limit = tl.load(lengths_ptr + b).to(tl.int32)",
        ("tests/ops/test_attention.py", "-k", "lengths"), interpreted=True),
    Own("the attention's lengths are not clamped", f"{KERNELS}attention.py",
        "limit = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + b), n_kv)).to(tl.int32)",
        "limit = tl.load(lengths_ptr + b).to(tl.int32)",
        ("tests/ops/test_attention.py", "-k", "lengths"), interpreted=True),
]  # fmt: skip
