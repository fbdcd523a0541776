"""The few-step scheduler against the published loops, written by hand, and diffusers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.measures import relative_l2
from turbo_rcm_patch.errors import ConfigError, SamplingError
from turbo_rcm_patch.video.rcm_times import noise_stream, rcm_times
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import SCHEDULES

SHAPE = (1, 4, 2, 6, 5)


def network(x: torch.Tensor, t: float) -> torch.Tensor:
    """A velocity that depends on everything, in fp64."""
    return torch.sin(3 * x.double()) * (0.5 + t) - 0.2 * x.double()


def draw(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(scheduler: RCMScheduler, steps: int, noise: torch.Tensor, **kwargs) -> torch.Tensor:
    scheduler.set_timesteps(steps)
    x = scheduler.init_noise(noise)
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(network(x, float(scheduler.sigmas[i])), t, x, **kwargs).prev_sample
    return x


def by_hand(times: list[float], form: str, noise: torch.Tensor, eps) -> torch.Tensor:
    x = noise.double() * times[0]
    for t, t_next in zip(times, times[1:], strict=False):
        v = network(x, t)
        if form == "ode":
            x = x - (t - t_next) * v
        else:
            x = (1 - t_next) * (x - t * v) + t_next * next(eps).double()
    return x


def rcm_by_hand(steps: int, sigma_max: float = 80.0) -> list[float]:
    trig = [math.atan(sigma_max), 1.5, 1.4, 1.0][:steps] + [0.0]
    return [math.sin(a) / (math.cos(a) + math.sin(a)) for a in trig]


WARPED = [1.0, 0.9375, 2.5 / 3, 0.625, 0.0]
#: A scheduler, and the times of its steps in t.
LOOPS: dict[str, tuple[Callable[..., RCMScheduler], list[float]]] = {
    "rcm-1": (RCMScheduler, rcm_by_hand(1)),
    "rcm-3": (RCMScheduler, rcm_by_hand(3)),
    "rcm-4-200": (partial(RCMScheduler, sigma_max=200.0), rcm_by_hand(4, 200.0)),
    "lightning": (partial(RCMScheduler.named, "lightning"), WARPED),
    "self-forcing": (partial(RCMScheduler.named, "self-forcing"), WARPED),
    "fastwan": (partial(RCMScheduler.named, "fastwan"), [1.0, 0.757, 0.522, 0.0]),
    "list": (partial(RCMScheduler, times=[980, 500.5]), [0.98, 0.5005, 0.0]),
    "unshifted": (partial(RCMScheduler.named, "lightning", shift=1), [1.0, 0.75, 0.5, 0.25, 0.0]),
}


@pytest.mark.parametrize("form", ["sde", "ode"])
@pytest.mark.parametrize("name", LOOPS)
def test_equals_the_loop_written_by_hand(name: str, form: str) -> None:
    make, times = LOOPS[name]
    steps = len(times) - 1
    stream = noise_stream(7, "rcm-renoise")
    eps = iter([*(torch.randn(SHAPE, generator=stream) for _ in range(steps)), torch.zeros(SHAPE)])
    ours = sample(make(sampler=form, noise_seed=7), steps, draw())
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, by_hand(times, form, draw(), eps), rtol=0, atol=1e-12)


def test_a_schedule_steps_as_its_authors_do() -> None:
    """LightX2V's scheduler for Wan 2.2 takes Euler steps, the others add noise."""
    forms = {name: RCMScheduler.named(name).config.sampler for name in SCHEDULES}
    assert forms == {"lightning": "ode", "fastwan": "sde", "self-forcing": "sde"}
    with pytest.raises(ConfigError, match="lightning.*RCMScheduler"):
        RCMScheduler.named("dmd")


def test_times_are_the_published_ones() -> None:
    expected = [0.98765, 0.93378, 0.85290, 0.60898, 0.0]
    assert rcm_times(4).tolist() == pytest.approx(expected, abs=5e-6)
    assert float(rcm_times(4, 200.0)[0]) == pytest.approx(0.99502, abs=5e-6)
    assert rcm_times(4).tolist()[-1] == 0.0


def test_rounded_network_times_are_turbodiffusions() -> None:
    scheduler = RCMScheduler(timestep_dtype="bfloat16")
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [988.0, 932.0, 852.0, 608.0]
    assert scheduler.sigmas[0] == rcm_times(4)[0], "only what the network sees is rounded"


@pytest.mark.parametrize(("steps", "sigma_max"), [(1, 80.0), (4, 80.0), (3, 200.0)])
def test_equals_the_stochastic_flow_matching_scheduler(steps: int, sigma_max: float) -> None:
    ours = RCMScheduler(sigma_max=sigma_max)
    theirs = FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)
    ours.set_timesteps(steps)
    theirs.set_timesteps(sigmas=ours.sigmas[:-1].tolist())
    a = ours.init_noise(draw())
    b = a.float()
    g, h = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for i in range(steps):
        t = float(ours.sigmas[i])
        a = ours.step(network(a, t).float(), ours.timesteps[i], a, generator=g).prev_sample
        v = network(b, t).float()
        b = theirs.step(v, theirs.timesteps[i], b, generator=h).prev_sample
    torch.testing.assert_close(a.float(), b, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.timesteps, theirs.timesteps, rtol=1e-6, atol=0)


def test_renoising_has_a_stream_of_its_own() -> None:
    before = torch.random.get_rng_state()
    scheduler = RCMScheduler(noise_seed=5)
    first = sample(scheduler, 4, draw())
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is untouched"
    assert torch.equal(first, sample(scheduler, 4, draw())), "set_timesteps starts it again"
    scheduler.set_noise_seed(6)
    assert not torch.equal(first, sample(scheduler, 4, draw()))
    initial = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    renoise = torch.randn(SHAPE, generator=noise_stream(5, "rcm-renoise"))
    correlation = float((initial * renoise).sum() / (initial.norm() * renoise.norm()))
    assert abs(correlation) < 0.3, "the same seed gives independent noises"


@pytest.mark.parametrize("place", [64, 1024, -1])
def test_every_value_of_the_first_sample_seeds_the_renoising(place: int) -> None:
    """Two videos that begin alike, as those of one first frame do, differ in their noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 4, 3, 20, 20, generator=generator, dtype=torch.float64)
    other = noise.clone()
    other.view(-1)[place] += 1e-3
    drawn = []
    for x in (noise, other, noise.clone(memory_format=torch.channels_last_3d)):
        scheduler = RCMScheduler()
        scheduler.set_timesteps(2)
        v = torch.zeros_like(x)
        x = scheduler.step(v, scheduler.timesteps[0], x).prev_sample
        drawn.append((x - (1 - scheduler.sigmas[1]) * noise) / scheduler.sigmas[1])
    assert relative_l2(drawn[1], drawn[0]) > 1.0
    assert torch.equal(drawn[0], drawn[2]), "the layout does not matter"


def test_noise_can_come_from_a_generator_of_the_caller() -> None:
    """One draw a step for a whole batch, right after the initial noise."""
    scheduler = RCMScheduler(noise_seed=5)
    own = sample(scheduler, 4, draw())
    generator = torch.Generator().manual_seed(3)
    scheduler.set_noise_generator(generator)
    noise = torch.randn(2, *SHAPE[1:], generator=generator)
    x = sample(scheduler, 4, noise)

    scheduler.set_noise_generator(None)
    again = torch.Generator().manual_seed(3)
    first = torch.randn(2, *SHAPE[1:], generator=again)
    steps = iter([*(torch.randn(noise.shape, generator=again) for _ in range(3)), first * 0])
    expected = by_hand(rcm_by_hand(4), "sde", first, steps)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
    scheduler.set_noise_generator(generator)
    assert not torch.equal(x, sample(scheduler, 4, noise)), "it goes on where it is"
    scheduler.set_noise_generator(None)
    assert torch.equal(own, sample(scheduler, 4, draw())), "and the seed is as it was"


@pytest.mark.parametrize("steps", [0, 5, 50, -1, 2.0, None])
def test_other_step_counts_are_refused_with_a_remedy(steps: object) -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 4.*sampler='scheduler'"):
        RCMScheduler().set_timesteps(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"sampler": "euler"},
        {"sigma_max": 0.0},
        {"sigma_max": math.nan},
        {"timestep_dtype": "f8"},
        {"noise_seed": 1.5},
        {"times": [500, 1000]},
        {"times": [1000, 0]},
    ],
    ids=str,
)
def test_bad_configurations_are_refused(kwargs: dict) -> None:
    with pytest.raises(ConfigError):
        RCMScheduler(**kwargs)


def test_times_that_would_not_decrease_are_refused() -> None:
    RCMScheduler(sigma_max=10.0).set_timesteps(1)
    with pytest.raises(ConfigError, match=r"more than 14\.1"):
        RCMScheduler(sigma_max=10.0).set_timesteps(2)
    with pytest.raises(ConfigError, match="expected 3, one for each of the times"):
        RCMScheduler.named("fastwan").set_timesteps(4)


def test_misuse_is_refused() -> None:
    scheduler = RCMScheduler()
    with pytest.raises(SamplingError, match="set_timesteps"):
        scheduler.step(draw(), 1.0, draw())
    scheduler.set_timesteps(1)
    with pytest.raises(SamplingError, match="Iterate over"):
        scheduler.step(draw(), 123.0, draw())
    scheduler.step(draw(), scheduler.timesteps[0], draw())
    with pytest.raises(SamplingError, match="one more call"):
        scheduler.step(draw(), scheduler.timesteps[0], draw())


def test_starts_in_the_middle_like_any_scheduler() -> None:
    scheduler = RCMScheduler(sampler="ode")
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(2)
    x = draw()
    t, t_next = scheduler.sigmas[2:4].tolist()
    out = scheduler.step(network(x, t), scheduler.timesteps[2], x).prev_sample
    torch.testing.assert_close(out, x - (t - t_next) * network(x, t))
    scheduler.set_timesteps(4)
    by_time = scheduler.step(network(x, t), scheduler.timesteps[2], x).prev_sample
    assert torch.equal(out, by_time)


def test_configuration_survives_saving_and_other_schedulers(tmp_path) -> None:
    scheduler = RCMScheduler(sigma_max=200.0, sampler="ode")
    scheduler.save_pretrained(tmp_path)
    again = RCMScheduler.from_pretrained(tmp_path)
    assert dict(again.config)["sigma_max"] == 200.0
    assert again.config.sampler == "ode"
    assert RCMScheduler.from_config(scheduler.config).config.sigma_max == 200.0
    RCMScheduler.named("lightning").save_pretrained(tmp_path)
    again = RCMScheduler.from_pretrained(tmp_path)
    again.set_timesteps(4)
    assert again.sigmas.tolist() == pytest.approx(WARPED) and again.config.sampler == "ode"
    for other in (FlowMatchEulerDiscreteScheduler(shift=3.0), UniPCMultistepScheduler()):
        mine = RCMScheduler.from_config(other.config)
        assert mine.config.sigma_max == 80.0 and mine.config.times is None
        assert mine.config.num_train_timesteps == 1000


def test_add_noise_is_the_rectified_flow() -> None:
    x, eps = draw(1), draw(2)
    out = RCMScheduler().add_noise(x, eps, torch.tensor([250.0]))
    torch.testing.assert_close(out, 0.75 * x + 0.25 * eps)
