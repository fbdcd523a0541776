"""Which tests look at which file. The first ones named run first."""

from __future__ import annotations

__all__ = ["tests_of"]

P, O = "tests/patching/", "tests/ops/"

#: Part of a path -> files of tests, the quick and sharp ones first.
_TESTS: tuple[tuple[str, str], ...] = (
    ("patching/author.py", f"{P}test_guard.py {P}test_guard_traces.py {P}test_linears.py"),
    ("patching/backend.py", f"{P}test_backend.py"),
    ("patching/block", f"{P}test_patch.py {P}test_short_way.py {P}test_plan.py {P}test_around.py "
     f"{P}test_edges.py {P}test_wan_family.py {P}test_linears.py"),
    ("patching/branches.py", f"{P}test_patch.py {P}test_linears.py {P}test_wan_family.py "
     f"{P}test_plan.py {P}test_sla.py {P}test_turbodiffusion.py {P}test_around.py"),
    ("patching/copies.py", f"{P}test_int8_copies.py {P}test_linears.py {P}test_orders.py"),
    ("patching/find.py", f"{P}test_find.py {P}test_api.py {P}test_refusals.py"),
    ("patching/graphs.py", f"{P}test_graphs.py"),
    ("patching/guard.py", f"{P}test_guard.py {P}test_guard_traces.py {P}test_guard_mutants.py"),
    ("patching/int8_weights.py", f"{P}test_int8_copies.py {P}test_linears.py"),
    ("patching/linears.py", f"{P}test_linears.py {P}test_int8_copies.py {P}test_quantisers.py"),
    ("patching/measure.py", f"{P}test_guard.py {P}test_guard_mutants.py"),
    ("patching/pairs.py", f"{P}test_patch.py {P}test_refusals.py {P}test_said.py {P}test_find.py"),
    ("patching/parallel.py", f"{P}test_parallel.py {P}test_ranks.py"),
    ("patching/patch.py", f"{P}test_patch.py {P}test_orders.py {P}test_refusals.py {P}test_api.py "
     f"{P}test_edges.py {P}test_sla.py"),
    ("patching/plain.py", f"{P}test_around.py {P}test_plan.py {P}test_linears.py {P}test_edges.py"),
    ("patching/plan.py", f"{P}test_plan.py {P}test_short_way.py {P}test_edges.py"),
    ("patching/record.py", f"{P}test_patch.py {P}test_orders.py {P}test_around.py "
     f"{P}test_caches.py"),
    ("patching/registry.py", f"{P}test_find.py {P}test_refusals.py"),
    ("patching/report.py", f"{P}test_said.py {P}test_api.py {P}test_patch.py {P}test_guard.py"),
    ("patching/sla.py", f"{P}test_sla.py {P}test_sla_around.py tests/checkpoints/test_sla_kept.py"),
    ("patching/state.py", f"{P}test_guard.py {P}test_said.py {P}test_patch.py"),
    ("patching/stored.py", "tests/checkpoints/test_sla_kept.py tests/checkpoints/test_extra.py"),
    ("families/cogvideox", f"{P}test_cogvideox.py {P}test_cogvideox_refusals.py "
     f"{P}test_cogvideox_around.py"),
    ("families/consisid", f"{P}test_cogvideox.py {P}test_cogvideox_refusals.py"),
    ("families/turbo", f"{P}test_turbodiffusion.py"),
    ("families/rcm", f"{P}test_rcm_attention.py tests/models/test_rcm_attention.py"),
    ("families/", f"{P}test_wan_family.py {P}test_patch.py {P}test_refusals.py "
     f"{P}test_wan_family_around.py {P}test_sla.py"),
    ("ops/attention.py", f"{O}test_attention.py {O}test_masked_attention.py {O}test_edges.py "
     f"{O}test_refusals.py {O}test_transforms.py {O}test_batches.py"),
    ("ops/batches.py", f"{O}test_batches.py"),
    ("ops/checks.py", f"{O}test_refusals.py {O}test_edges.py {O}test_int8_linear.py "
     f"{O}test_sparse_linear.py {O}test_projection.py"),
    ("ops/denoise.py", f"{O}test_denoise.py {O}test_edges.py"),
    ("ops/dispatch.py", f"{O}test_dispatch.py tests/test_tune.py"),
    ("ops/elementwise.py", f"{O}test_elementwise.py {O}test_edges.py {O}test_transforms.py "
     f"{O}test_int8_linear.py {O}test_registration.py {O}test_batches.py"),
    ("ops/emulation.py", f"{O}test_attention.py {O}test_edges.py"),
    ("ops/exchange.py", f"{O}test_parallel.py {P}test_parallel.py"),
    ("ops/fingerprint.py", f"{O}test_fingerprint.py {P}test_int8_copies.py"),
    ("ops/fused.py", f"{O}test_attention.py {O}test_dispatch.py {O}test_edges.py "
     f"{O}test_transforms.py {O}test_registration.py {O}test_batches.py"),
    ("ops/gradients.py", f"{O}test_transforms.py {O}test_registration.py {O}test_attention.py"),
    ("ops/int8_linear.py", f"{O}test_int8_linear.py {O}test_edges.py {O}test_transforms.py "
     f"{O}test_registration.py {O}test_batches.py"),
    ("ops/modes.py", f"{O}test_transforms.py {O}test_edges.py {P}test_transforms.py"),
    ("ops/operation.py", f"{O}test_registration.py {O}test_transforms.py"),
    ("ops/parallel.py", f"{O}test_parallel.py {P}test_parallel.py"),
    ("ops/projection.py", f"{O}test_projection.py {O}test_edges.py {O}test_transforms.py "
     f"{O}test_registration.py {O}test_refusals.py {O}test_batches.py"),
    ("ops/quantize.py", f"{O}test_int8_linear.py {O}test_edges.py {O}test_registration.py"),
    ("ops/reference.py", f"{O}test_attention.py {O}test_edges.py"),
    ("ops/registry.py", f"{O}test_registration.py {O}test_attention.py {O}test_transforms.py "
     f"{O}test_edges.py"),
    ("ops/sage.py", f"{O}test_refusals.py {O}test_sageattn.py"),
    ("ops/sageattn.py", f"{O}test_sageattn.py"),
    ("ops/shards.py", f"{O}test_parallel.py {P}test_parallel.py"),
    ("ops/sparse_linear.py", f"{O}test_sparse_linear.py {O}test_edges.py {O}test_transforms.py "
     f"{O}test_registration.py {O}test_batches.py"),
    ("ops/sparse_reference.py", f"{O}test_sparse_linear.py"),
    ("ops/spec.py", f"{O}test_refusals.py {O}test_edges.py {O}test_attention.py"),
    ("ops/streams.py", f"{O}test_streams.py {O}test_edges.py {O}test_transforms.py "
     f"{O}test_registration.py {O}test_batches.py"),
    ("sampling/verdict.py", "tests/sampling/test_verdict.py tests/sampling/test_compare.py"),
)  # fmt: skip


def tests_of(file: str) -> list[str]:
    """The test files that cover a file of the package."""
    return next((tests.split() for part, tests in _TESTS if part in file), ["tests"])
