"""The few-step sampler of rCM models as a diffusers scheduler.

TrigFlow times atan(sigma_max), 1.5, 1.4, 1.0 and 0 are mapped to rectified-flow time t = sin/(cos
+ sin), where the network predicts a velocity v and the clean sample is x0 = x - t v: the skip pair
of the whole network, (c_skip, c_out) = (1, -t).
"""

from __future__ import annotations

import hashlib
import math
from typing import ClassVar, Final, Literal

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin, SchedulerOutput

from turbo_rcm_patch.errors import ConfigError, SamplingError

__all__ = ["MAX_STEPS", "RCMScheduler", "noise_stream", "rcm_times"]

#: TrigFlow times between the first and the last, as the published few-step Wan models were
#: distilled.
MID_TIMES: Final = (1.5, 1.4, 1.0)
MAX_STEPS: Final = len(MID_TIMES) + 1


def rcm_times(steps: int, sigma_max: float = 80.0) -> torch.Tensor:
    """Rectified-flow times of the rCM sampler.

    Args:
        steps: Number of network calls, 1 to 4.
        sigma_max: Noise level of the first call (80; 200 for Wan 2.2 I2V).

    Returns:
        Times t from the noisiest down to exactly 0, fp64, [steps + 1].
    """
    if not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise ConfigError(
            "steps of the rCM sampler",
            expected=f"a whole number from 1 to {MAX_STEPS}",
            got=repr(steps),
            remedy="Use sampler='scheduler' for a model that needs more steps than an rCM student",
        )
    first = math.atan(sigma_max)
    if steps > 1 and first <= MID_TIMES[0]:
        raise ConfigError(
            "sigma_max of the rCM sampler",
            expected=f"more than {math.tan(MID_TIMES[0]):.1f}, so that times decrease",
            got=repr(sigma_max),
            remedy="Use 80, the value the models were distilled with (200 for Wan 2.2 I2V)",
        )
    trig = torch.tensor([first, *MID_TIMES[: steps - 1], 0.0], dtype=torch.float64)
    return torch.sin(trig) / (torch.cos(trig) + torch.sin(trig))


def noise_stream(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one purpose of one seed, so that streams of the same seed never repeat
    each other.
    """
    digest = hashlib.blake2b(f"{name}:{seed}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


class RCMScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """1 to 4 steps of an rCM student, in any pipeline that takes a flow-matching scheduler.

    The state x is updated in fp64 around a network of any dtype:

    - "sde": x <- (1 - t') (x - t v) + t' eps, with fresh noise eps in every step but the last;
    - "ode": x <- x - (t - t') v.

    Re-noising draws fp32 numbers from a CPU generator of its own, so it is the same on every
    device, does not touch the global generator and starts again with every `set_timesteps`.
    `WanPipeline` does not scale the initial noise, so pass `latents=scheduler.init_noise(noise)`.

    Args:
        num_train_timesteps: Network time per unit of t; Wan's expert boundary is a fraction of it.
        sigma_max: Noise level of the first step (80; 200 for Wan 2.2 I2V).
        sampler: "sde" or "ode".
        noise_seed: Seed of the re-noising. `set_noise_seed` changes it without a new scheduler.
        timestep_dtype: "float32", or "bfloat16" to round network times as TurboDiffusion does
            (988, 932, 852, 608).
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
        sampler: Literal["sde", "ode"] = "sde",
        noise_seed: int = 0,
        timestep_dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        if sampler not in ("sde", "ode"):
            raise ConfigError("RCMScheduler.sampler", expected="'sde' or 'ode'", got=repr(sampler))
        if timestep_dtype not in ("float32", "bfloat16"):
            raise ConfigError(
                "RCMScheduler.timestep_dtype",
                expected="'float32' or 'bfloat16'",
                got=repr(timestep_dtype),
            )
        if not 0.0 < sigma_max < float("inf"):
            raise ConfigError(
                "RCMScheduler.sigma_max", expected="a positive number", got=repr(sigma_max)
            )
        self.init_noise_sigma = sigma_max / (1.0 + sigma_max)
        self.num_inference_steps: int | None = None
        self.timesteps = torch.empty(0)
        self.sigmas = torch.empty(0, dtype=torch.float64)
        self._step_index: int | None = None
        self._begin_index: int | None = None
        self.set_noise_seed(noise_seed)

    @property
    def step_index(self) -> int | None:
        """Index of the next step, None before the first."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """Index of the first step, None unless a pipeline has set it."""
        return self._begin_index

    def __len__(self) -> int:
        return int(self.config.num_train_timesteps)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Start at this step; pipelines call it so that nothing is looked up on the device."""
        self._begin_index = begin_index

    def set_noise_seed(self, seed: int) -> None:
        """Start the re-noising stream of `seed`. It differs from every stream that `seed` gives
        elsewhere.
        """
        self._noise_seed = seed
        self._generator = noise_stream(seed, "rcm-renoise")

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None
    ) -> None:
        """Set the times of a generation and start the re-noising stream again.

        Args:
            num_inference_steps: 1 to 4.
            device: Where `timesteps` will live; `sigmas` stay on the CPU, so that a step never
                waits for the device.
        """
        times = rcm_times(num_inference_steps, float(self.config.sigma_max))
        rounding = getattr(torch, self.config.timestep_dtype)
        network_times = (times[:-1] * self.config.num_train_timesteps).to(rounding)
        self.num_inference_steps = num_inference_steps
        self.sigmas = times
        self.timesteps = network_times.to(device=device, dtype=torch.float32)
        self._step_index = None
        self._begin_index = None
        self.set_noise_seed(self._noise_seed)

    def init_noise(self, noise: torch.Tensor) -> torch.Tensor:
        """The first sample: standard normal noise times t0, in fp64."""
        return noise.to(torch.float64) * self.init_noise_sigma

    def scale_model_input(
        self, sample: torch.Tensor, timestep: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """The network of a rectified flow takes the sample as it is."""
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor]:
        """One update.

        Args:
            model_output: Velocity v, any float dtype, [B, C, F, H, W] (or any shape).
            timestep: One of `timesteps`; only read if no step has run since `set_timesteps`.
            sample: x, same shape, any float dtype.
            generator: Source of the noise in place of the scheduler's own stream.
            return_dict: Whether to return an output object or a tuple.

        Returns:
            The next x in fp64.
        """
        if self.num_inference_steps is None:
            raise SamplingError(
                "RCMScheduler.step came before set_timesteps",
                remedy="Call set_timesteps(steps) first",
            )
        if self._step_index is None:
            self._step_index = (
                self._find_index(timestep) if self._begin_index is None else self._begin_index
            )
        if self._step_index >= self.num_inference_steps:
            raise SamplingError(
                "RCMScheduler.step was called more often than there are steps",
                expected=f"{self.num_inference_steps} calls",
                remedy="Call set_timesteps(steps) again before the next generation",
            )
        t, t_next = self.sigmas[self._step_index : self._step_index + 2].tolist()
        x, v = sample.to(torch.float64), model_output.to(torch.float64)
        if self.config.sampler == "ode":
            x = x - (t - t_next) * v
        else:
            x = (1.0 - t_next) * (x - t * v)
            if t_next > 0.0:
                x = x + t_next * self._noise_like(sample, generator)
        self._step_index += 1
        return SchedulerOutput(prev_sample=x) if return_dict else (x,)

    def add_noise(
        self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """x_t = (1 - t) x0 + t eps at network times [B], in the dtype of the samples."""
        t = timesteps.to(original_samples.device, torch.float64) / self.config.num_train_timesteps
        t = t.reshape(-1, *(1,) * (original_samples.ndim - 1))
        noisy: torch.Tensor = (1.0 - t) * original_samples + t * noise
        return noisy.to(original_samples.dtype)

    def _noise_like(self, sample: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        source = self._generator if generator is None else generator
        eps = torch.randn(
            sample.shape, generator=source, device=source.device, dtype=torch.float32
        )
        if sample.device.type == "cuda" and eps.device.type == "cpu":
            eps = eps.pin_memory()  # so that the copy does not wait for the network
        return eps.to(sample.device, non_blocking=True).to(torch.float64)

    def _find_index(self, timestep: float | torch.Tensor) -> int:
        wanted = float(timestep)
        distance = (self.timesteps.to("cpu", torch.float64) - wanted).abs()
        index = int(distance.argmin())
        if float(distance[index]) > 1e-3 * max(1.0, wanted):
            raise SamplingError(
                "timestep",
                expected=f"one of {[round(t, 3) for t in self.timesteps.tolist()]}",
                got=f"{wanted:g}",
                remedy="Iterate over scheduler.timesteps",
            )
        return index
