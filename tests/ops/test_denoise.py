"""The fused step of a sampler: value, dtype, gradient, registration, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.implementations import Implementation, over
from turbo_rcm_patch import errors
from turbo_rcm_patch.ops import denoise_step
from turbo_rcm_patch.ops.denoise import denoise_forward

pytestmark = pytest.mark.usefixtures("poisoned")

SHAPE = (2, 4, 3, 5, 6)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_the_skip_and_then_the_noise_in_fp64(dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE, dtype=torch.float64)
    v, eps = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE)
    t, t_next = 0.98765, 0.93378
    out = denoise_step(x, v, eps, numbers(1 - t_next, -(1 - t_next) * t, t_next))
    expected = (1 - t_next) * (x - t * v.double()) + t_next * eps.double()
    assert out.dtype == torch.float64 and out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-15)


NOISY = [pytest.param(False, id="last-step"), pytest.param(True, id="re-noising")]


@over(
    interpreter={
        "dtype": [torch.float64, torch.float32, torch.float16],
        "noisy": NOISY,
        "shape": [(2, 3, 5, 7, 11)],
    },
    gpu={
        "dtype": [torch.float64, torch.float32, torch.bfloat16],
        "noisy": NOISY,
        "shape": [(2, 5, 16, 30, 52)],
    },
)
def test_the_kernel_s_step_is_that_of_the_reference_to_the_last_bits_of_fp64(
    on: Implementation, dtype: torch.dtype, noisy: bool, shape: tuple[int, ...]
) -> None:
    x = on.randn(*shape, dtype=torch.float64).transpose(1, 2)
    branch = on.randn(*x.shape, dtype=dtype)
    noise = on.randn(*x.shape) if noisy else None
    c = torch.tensor([[0.1, 5.0], [-0.7, 5.0], [0.9, 5.0]], dtype=torch.float64, device=on.device)
    out = denoise_step(x, branch, noise, c[:, 0], impl=on.impl)
    assert out.dtype == torch.float64
    expected = denoise_step(x, branch, noise, c[:, 0], impl="reference")
    near = {"interpreter": 1e-15, "gpu": 1e-14}[on.name]
    torch.testing.assert_close(out, expected, rtol=0, atol=near)


def test_a_step_without_noise_takes_strided_inputs() -> None:
    x, v = torch.randn(4, 6), torch.randn(6, 4).T
    out = denoise_step(x, v, None, numbers(0.5, -2.0, 7.0))
    torch.testing.assert_close(out, 0.5 * x.double() - 2 * v.double(), rtol=0, atol=1e-15)


def test_gradients_are_the_coefficients_and_the_registration_passes_opcheck() -> None:
    leaves = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    c = numbers(0.3, -0.5, 0.2)
    torch.library.opcheck(denoise_forward.registered, (*leaves, c, "reference"))
    torch.library.opcheck(denoise_forward.registered, (*leaves[:2], None, c, "reference"))
    grads = torch.autograd.grad(denoise_step(*leaves, c).sum(), leaves)
    for grad, factor in zip(grads, c.tolist(), strict=True):
        torch.testing.assert_close(grad, torch.full(SHAPE, factor))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"branch": torch.zeros(2, 3)}, errors.ShapeError, "branch"),
        ({"noise": torch.zeros(3)}, errors.ShapeError, "noise"),
        ({"noise": torch.zeros(2, 2).int()}, errors.DTypeError, "noise"),
        ({"coefficients": torch.zeros(2).double()}, errors.ShapeError, "coefficients"),
        ({"coefficients": torch.zeros(3)}, errors.DTypeError, "float64"),
        (
            {"coefficients": torch.zeros(3).double().requires_grad_()},
            errors.GradientError,
            "coefficients",
        ),
    ],
    ids=["branch", "noise-shape", "noise-dtype", "two-numbers", "fp32-numbers", "gradient"],
)
def test_wrong_arguments_are_typed_errors(
    change: dict[str, torch.Tensor], error: type[Exception], says: str
) -> None:
    given = {"x": torch.zeros(2, 2), "branch": torch.zeros(2, 2), "noise": None}
    given |= {"coefficients": numbers(1, 1, 1)}
    with pytest.raises(error, match=says):
        denoise_step(**given | change)


def test_triton_on_a_cpu_is_refused_with_a_remedy() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(errors.DeviceError, match="reference"):
        denoise_step(x, x, None, numbers(1, 1, 1), impl="triton")
