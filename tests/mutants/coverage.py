"""Which tests look at which file. The first ones named run first."""

from __future__ import annotations

__all__ = ["kernel_tests_of", "tests_of"]

_FOLDERS = {"p": "patching/", "o": "ops/", "c": "turbodiffusion/", "s": "video/", "m": "models/"}

#: Part of a path -> names of test files: p:patch is tests/patching/test_patch.py.
_TESTS = {
    "patching/author.py": "p:guard p:guard_traces p:linears",
    "patching/backend.py": "p:backend",
    "patching/block":
        "p:signs p:turbodiffusion p:sla p:patch p:short_way p:plan p:around p:edges p:wan_family "
        "p:linears p:fused_norms p:cogvideox_around",
    "patching/branches.py":
        "p:signs p:joined p:fused_norms p:patch p:linears p:wan_family p:plan p:sla "
        "p:turbodiffusion p:around",
    "patching/calibration.py": "p:precision",
    "patching/copies.py": "p:int8_copies p:linears p:orders",
    "patching/find.py": "p:find p:api p:refusals",
    "patching/graphs.py": "p:graphs p:parallel_graphs",
    "patching/guard.py": "p:guard p:measure p:guard_traces p:guard_mutants p:precision",
    "patching/int8_linear.py": "p:int8_only c:int8_folder",
    "patching/int8_only.py": "p:int8_only c:int8_folder",
    "patching/int8_weights.py": "p:int8_copies p:linears",
    "patching/joined.py": "p:joined p:compile",
    "patching/linears.py":
        "p:signs p:linears p:joined p:cogvideox_around p:fused_norms p:int8_copies p:quantisers "
        "p:int8_only",
    "patching/measure.py": "p:measure p:guard p:guard_mutants",
    "patching/noise.py": "p:precision p:parallel_precision",
    "patching/pairs.py": "p:patch p:refusals p:said p:find",
    "patching/parallel.py":
        "p:parallel p:ranks p:parallel_patched p:parallel_graphs p:parallel_precision",
    "patching/patch.py": "p:patch p:graphs p:orders p:refusals p:api p:edges c:sla_kept p:sla",
    "patching/plain.py": "p:around p:plan p:linears p:edges",
    "patching/plan.py": "p:plan p:short_way p:edges",
    "patching/record.py": "p:patch p:orders p:around p:caches p:graphs p:fused_norms",
    "patching/registry.py": "p:find p:refusals",
    "patching/replay_timer.py": "p:replay_timer p:parallel_graphs",
    "patching/report.py": "p:said p:api p:patch p:guard",
    "patching/sla.py": "p:sla p:sla_around c:sla_kept",
    "patching/state.py": "p:linears p:guard p:said p:patch p:precision",
    "patching/stored.py": "c:sla_kept c:extra",
    "families/_parallel": "p:parallel p:ranks p:parallel_patched",
    "families/wan_plan": "p:sla p:patch p:refusals p:wan_family p:signs p:wan_family_around",
    "families/wan_sla": "p:sla p:sla_around c:sla_kept",
    "families/cogvideox": 
        "p:signs p:cogvideox p:cogvideox_refusals p:cogvideox_around p:parallel_patched",
    "families/consisid": "p:cogvideox p:cogvideox_refusals",
    "families/turbo": "p:signs p:turbodiffusion",
    "families/rcm": "p:rcm_attention m:rcm_attention",
    "families/": "p:signs p:wan_family p:patch p:refusals p:wan_family_around p:sla",
    "ops/attention.py": "o:attention o:masked_attention o:edges o:refusals o:transforms o:batches",
    "ops/batches.py": "o:batches",
    "ops/checks.py": "o:refusals o:edges o:int8_linear o:sparse_linear o:projection",
    "ops/denoise.py": "o:denoise o:edges",
    "ops/dispatch.py": "o:dispatch tune",
    "ops/elementwise.py":
        "o:elementwise o:edges o:transforms o:int8_linear o:registration o:batches",
    "ops/emulation.py": "o:attention o:edges",
    "ops/exchange.py": "o:parallel p:parallel_patched p:parallel_graphs",
    "ops/fingerprint.py": "o:fingerprint p:int8_copies",
    "ops/fused.py":
        "o:projection o:attention o:dispatch o:edges o:transforms o:registration o:batches",
    "ops/gradients.py": "o:transforms o:registration o:attention",
    "ops/int8_linear.py": "o:int8_linear o:edges o:transforms o:registration o:batches",
    "ops/modes.py": "o:transforms o:edges p:transforms",
    "ops/operation.py": "o:registration o:transforms",
    "ops/parallel.py": "o:parallel p:parallel_patched",
    "ops/projection.py":
        "o:projection o:elementwise o:edges o:transforms o:registration o:refusals o:batches",
    "ops/quantize.py": "o:int8_linear o:edges o:registration",
    "ops/reference.py": "o:attention o:edges",
    "ops/registry.py": "o:registration o:attention o:transforms o:exact_heads o:edges",
    "ops/sage.py": "o:refusals o:sageattn",
    "ops/sageattn.py": "o:sageattn",
    "ops/self_test.py": "o:self_test o:dispatch",
    "ops/shards.py": "o:parallel p:parallel_patched",
    "ops/sparse_linear.py": "o:sparse_linear o:edges o:transforms o:registration o:batches",
    "ops/sparse_reference.py": "o:sparse_linear",
    "ops/spec.py": "o:refusals o:edges o:attention",
    "ops/streams.py": "o:streams o:edges o:transforms o:registration o:batches",
    "video/many.py": "s:many s:cogvideox s:generate_command",
    "video/verdict.py": "s:verdict s:compare",
}  # fmt: skip

#: Part of a path -> which of the test files have tests of its kernels in Triton's interpreter.
_KERNELS = {
    "patching/branches.py": "p:kernels",
    "ops/attention.py": "o:attention",
    "ops/batches.py": "o:attention o:projection",
    "ops/denoise.py": "o:denoise",
    "ops/elementwise.py": "o:elementwise p:kernels",
    "ops/fingerprint.py": "o:fingerprint",
    "ops/fused.py": "o:attention",
    "ops/int8_linear.py": "o:int8_linear",
    "ops/parallel.py": "o:parallel",
    "ops/projection.py": "o:projection",
    "ops/quantize.py": "o:int8_linear",
    "ops/registry.py": "p:kernels o:attention",
    "ops/shards.py": "o:parallel",
    "ops/sparse_linear.py": "o:sparse_linear",
    "ops/streams.py": "o:streams",
}


def _files(names: str) -> list[str]:
    found = []
    for name in names.split():
        folder, _, rest = name.rpartition(":")
        found.append(f"tests/{_FOLDERS.get(folder, '')}test_{rest}.py")
    return found


def kernel_tests_of(file: str) -> list[str]:
    """The test files whose interpreter tests run the kernels that a file of the package starts."""
    return _files(next((names for part, names in _KERNELS.items() if part in file), ""))


def tests_of(file: str) -> list[str]:
    """The test files that cover a file of the package."""
    return _files(next((names for part, names in _TESTS.items() if part in file), "")) or ["tests"]
