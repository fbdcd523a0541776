"""The few-step sampler of distilled rectified flows as a diffusers scheduler.

The network predicts a velocity v at time t, and the clean sample is x0 = x - t v: the skip pair of
the whole network, (c_skip, c_out) = (1, -t). A step closes that skip and adds noise up to the next
time, which is one linear combination of x, v and noise and runs as one pass over them. rCM's times
are TrigFlow's, atan(sigma_max), 1.5, 1.4, 1.0 and 0, mapped by t = sin/(cos + sin). Other students
(Lightning, FastWan, Self-Forcing) take the same step at times of their own; `settings.SCHEDULES`
says where each is published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Final, Literal, get_args

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin, SchedulerOutput

from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.video.rcm_times import noise_stream, rcm_times, step_coefficients
from turbo_rcm_patch.video.settings import SCHEDULES, SolverForm, check_times

#: Values of a sample that are added up before they tell it from others.
_ROW: Final = 1024
_DTYPES: Final = ("float32", "bfloat16")


def fingerprint(sample: torch.Tensor) -> int:
    """Compute a seed from all values of a sample, the same on every device and for every layout.

    The fp32 bits, in rows of `_ROW`, are added up by row and by column where the sample lies.
    Integers add up the same in any order, and only these sums leave the device.
    """
    bits = sample.detach().to(torch.float32).contiguous().view(torch.int32).flatten()
    whole = bits.numel() // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW)
    parts = (rows.sum(0), rows.sum(1), bits[whole:].long())
    sums = torch.cat(parts).cpu().numpy()
    digest = hashlib.blake2b(sums.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class RCMScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """A scheduler for the few steps of a distilled model, in pipelines for flow matching.

    Without `times` it is rCM's, for 1 to 4 steps. `RCMScheduler.named("lightning")` has the times
    of another published student.

    The state x is updated in fp64 around a network of any dtype:

    - "sde": x <- (1 - t') (x - t v) + t' eps, with fresh noise eps in every step but the last;
    - "ode": x <- x - (t - t') v.

    Re-noising draws fp32 numbers from separate CPU generators. So it is the same on every device,
    does not touch the global generator, and starts again with every `set_timesteps`.

    diffusers' Wan pipelines do not pass their `generator` to `step`. The seed of the re-noising
    therefore comes from the first sample, one seed for each video of a batch, so that all noise of
    a video depends on the pipeline's generator. `noise_seed` sets the seed instead, and a step's
    own `generator` comes before both.

    The pipelines do not scale the initial noise either. Pass
    `latents=scheduler.init_noise(noise)` to reproduce the published loop exactly. Otherwise the
    noise of the first call is too strong by the factor 1 / t0 (1.2 % for sigma_max 80, none where
    the first time is 1000).

    Args:
        num_train_timesteps: Network time per unit of t. Wan's expert boundary is a fraction of it.
        sigma_max: Noise level of the first step (80; 200 for Wan 2.2 I2V). Not read with `times`.
        sampler: "sde" or "ode".
        noise_seed: Seed of the re-noising of a whole batch; None takes one from the first sample
            for each video.
        timestep_dtype: "float32", or "bfloat16" to round network times as TurboDiffusion does
            (988, 932, 852, 608).
        times: Network times of the steps, of 1000, from the noisiest down and without the 0 at the
            end; None for rCM's. They are final: no shift is applied.

    Raises:
        ConfigError: An argument has another value.
    """

    _compatibles: ClassVar[list[str]] = [
        "FlowMatchEulerDiscreteScheduler",
        "UniPCMultistepScheduler",
    ]
    order = 1

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        sigma_max: float = 80.0,
        sampler: SolverForm = "sde",
        noise_seed: int | None = None,
        timestep_dtype: Literal["float32", "bfloat16"] = "float32",
        times: Sequence[float] | None = None,
    ) -> None:
        for name, value, right, expected in (
            ("sampler", sampler, sampler in get_args(SolverForm), "'sde' or 'ode'"),
            ("timestep_dtype", timestep_dtype, timestep_dtype in _DTYPES, f"one of {_DTYPES}"),
            ("sigma_max", sigma_max, 0.0 < sigma_max < float("inf"), "a positive number"),
            ("noise_seed", noise_seed, isinstance(noise_seed, int | None), "an integer or None"),
        ):
            if not right:
                raise ConfigError(f"RCMScheduler.{name}", expected=expected, got=repr(value))
        first = None if times is None else check_times(times)[0] / 1000
        self.init_noise_sigma = sigma_max / (1.0 + sigma_max) if first is None else first
        self.num_inference_steps: int | None = None
        self.timesteps = torch.empty(0)
        self.sigmas = torch.empty(0, dtype=torch.float64)
        #: Index of the next step, None before the first.
        self._step_index: int | None = None
        #: Index of the first step, None unless a pipeline has set it.
        self._begin_index: int | None = None
        self._coefficients = torch.empty(0, 3, dtype=torch.float64)
        self._generators: list[torch.Generator] = []

    @classmethod
    def named(cls, name: str, *, noise_seed: int | None = None) -> RCMScheduler:
        """Make the scheduler of a published schedule.

        Args:
            name: A key of `settings.SCHEDULES`: "lightning", "fastwan", "self-forcing".
            noise_seed: As for the class.

        Raises:
            ConfigError: There is no such schedule.
        """
        if name not in SCHEDULES:
            remedy = "RCMScheduler() is rCM's, and RCMScheduler(times=[...]) takes any times"
            known = f"one of {[*SCHEDULES]}"
            raise ConfigError("schedule", expected=known, got=repr(name), remedy=remedy)
        schedule = SCHEDULES[name]
        scheduler: RCMScheduler = cls(
            sampler=schedule.form, noise_seed=noise_seed, times=schedule.times
        )
        return scheduler

    def __len__(self) -> int:
        return int(self.config.num_train_timesteps)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Start at this step. Pipelines call it to avoid a look-up on the device."""
        self._begin_index = begin_index

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None
    ) -> None:
        """Set the times of a generation and start the re-noising stream again.

        Args:
            num_inference_steps: 1 to 4, or the number of `times`.
            device: Where `timesteps` will live; `sigmas` stay on the CPU, so that a step never
                waits for the device.

        Raises:
            ConfigError: There are no times for this number of steps.
        """
        fixed = self.config.times
        if fixed is None:
            times = rcm_times(num_inference_steps, float(self.config.sigma_max))
        elif num_inference_steps == len(fixed):
            times = torch.tensor([*fixed, 0.0], dtype=torch.float64) / 1000
        else:
            raise ConfigError(
                "num_inference_steps",
                expected=f"{len(fixed)}, one for each of the times {[round(t, 1) for t in fixed]}",
                got=repr(num_inference_steps),
            )
        rounding = getattr(torch, self.config.timestep_dtype)
        network_times = (times[:-1] * self.config.num_train_timesteps).to(rounding)
        self.num_inference_steps = num_inference_steps
        self.sigmas = times
        self._coefficients = step_coefficients(times, self.config.sampler)
        self.timesteps = network_times.to(device=device, dtype=torch.float32)
        self._step_index = None
        self._begin_index = None
        seed = self.config.noise_seed
        self._generators = [] if seed is None else [noise_stream(seed, "rcm-renoise")]

    def init_noise(self, noise: torch.Tensor) -> torch.Tensor:
        """Return the first sample: standard normal noise times t0, in fp64."""
        return noise.to(torch.float64) * self.init_noise_sigma

    def scale_model_input(
        self, sample: torch.Tensor, timestep: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sample unchanged, as the network of a rectified flow takes it."""
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor]:
        """Compute the next sample, in one pass over x, v and the noise.

        Args:
            model_output: Velocity v, any float dtype, [B, C, F, H, W] (or any shape).
            timestep: One of `timesteps`; read only on the first step after `set_timesteps`.
            sample: x, same shape, any float dtype.
            generator: Source of this step's noise; it takes precedence over all others.
            return_dict: Return an output object; False returns a tuple.

        Returns:
            The next x in fp64.
        """
        if self._step_index is None and self.num_inference_steps is not None:
            first = self._begin_index
            self._step_index = self._find_index(timestep) if first is None else first
        if self._step_index is None or self._step_index >= len(self._coefficients):
            raise SamplingError(
                "RCMScheduler.step",
                expected=f"set_timesteps before it, and {len(self._coefficients)} calls after",
                got="none" if self._step_index is None else "one more call",
                remedy="Call set_timesteps(steps) before each generation",
            )
        adds_noise = self.config.sampler == "sde" and float(self.sigmas[self._step_index + 1]) > 0
        noise = self._noise_like(sample, generator) if adds_noise else None
        if self._coefficients.device != sample.device:
            # All steps at once, so that a later one does not wait.
            self._coefficients = self._coefficients.to(sample.device)
        c_skip, c_out, c_noise = self._coefficients[self._step_index].unbind()
        x = c_skip * sample.double() + c_out * model_output.double()
        if noise is not None:
            x = x + c_noise * noise.double()
        self._step_index += 1
        return SchedulerOutput(prev_sample=x) if return_dict else (x,)

    def add_noise(
        self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Compute x_t = (1 - t) x0 + t eps at network times [B], in the dtype of the samples."""
        t = timesteps.to(original_samples.device, torch.float64) / self.config.num_train_timesteps
        t = t.reshape(-1, *(1,) * (original_samples.ndim - 1))
        noisy: torch.Tensor = (1.0 - t) * original_samples + t * noise
        return noisy.to(original_samples.dtype)

    def _noise_like(self, sample: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        if generator is None and not self._generators:
            # On the first step of a generation, whose sample is the pipeline's own noise.
            self._generators = [noise_stream(fingerprint(x), "rcm-renoise") for x in sample]
        sources = self._generators if generator is None else [generator]
        shape = sample.shape if len(sources) == 1 else sample.shape[1:]
        drawn = [
            torch.randn(shape, generator=source, device=source.device, dtype=torch.float32)
            for source in sources
        ]
        eps = drawn[0] if len(drawn) == 1 else torch.stack(drawn)
        if sample.device.type == "cuda" and eps.device.type == "cpu":
            eps = eps.pin_memory()  # so that the copy does not wait for the network
        return eps.to(sample.device, non_blocking=True)

    def _find_index(self, timestep: float | torch.Tensor) -> int:
        wanted, known = float(timestep), self.timesteps.tolist()
        index = min(range(len(known)), key=lambda i: abs(known[i] - wanted))
        if abs(known[index] - wanted) > 1e-3 * max(1.0, wanted):
            expected, remedy = f"one of {known}", "Iterate over scheduler.timesteps"
            raise SamplingError("timestep", expected=expected, got=f"{wanted:g}", remedy=remedy)
        return index


# A pipeline's folder holds the names of this class and of its module. diffusers imports no module
# that a folder names, but finds those that are imported already. So the folder names the package,
# and `import turbo_rcm_patch` is all that a new process needs before it loads the folder.
RCMScheduler.__module__ = "turbo_rcm_patch"
