"""diffusers' CogVideoX pipelines: 2B, 5B and 1.5, from text, from an image and from a video, with
their own schedulers.

The networks predict v = alpha noise - sigma x0 of a variance-preserving process, so few-step
samplers, which are a rectified flow's, are not for them. Latents are [B, F, C, H, W], as the
pipeline has them, and are kept in the network's dtype from step to step, as the pipeline does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.families import Job, PipelineFamily, States, draw
from turbo_rcm_patch.video.measures import TIMES
from turbo_rcm_patch.video.settings import Settings

if TYPE_CHECKING:
    from turbo_rcm_patch.video.generation import Conditioning


class CogVideoX(PipelineFamily):
    """`CogVideoXPipeline`: from text alone."""

    FEW_STEPS: ClassVar[bool] = False
    #: Those of CogVideoX 1.0, 2B and 5B.
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "height": 480, "width": 720, "num_frames": 49, "fps": 8, "max_sequence_length": 226
    }  # fmt: skip
    OWN: ClassVar[Mapping[str, object]] = {"steps": 50, "guidance_scale": 6.0}

    def latent_shape(
        self, pipe: Any, settings: Settings, conditioning: Conditioning | None = None
    ) -> tuple[int, ...]:
        """Return [1, F, C, H, W]. CogVideoX 1.5 denoises a whole number of its patches in time."""
        # ConsisID's class has no patches in time.
        patch = pipe.transformer.config.get("patch_size_t") or 1
        frames = _latent_frames(pipe, settings)
        return (
            1,
            -(-frames // patch) * patch,
            pipe.transformer.config.out_channels,
            settings.height // pipe.vae_scale_factor_spatial,
            settings.width // pipe.vae_scale_factor_spatial,
        )

    def frames_made(self, pipe: Any, asked: int) -> int:
        """Return how many frames the VAE makes: it takes latents in pairs, and the first of an odd
        number alone."""
        span = int(pipe.vae_scale_factor_temporal)
        latents = (asked - 1) // span + 1
        return span * latents if latents % 2 == 0 else span * (latents - 1) + 1

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the noise in the network's dtype: the pipelines scale it, and do not cast it."""
        noise = draw(self.latent_shape(job.pipe, job.settings, job.conditioning), job.seed)
        latents = noise.to(job.conditioning.embeds.dtype)
        return {"latents": latents, "num_frames": job.settings.num_frames}

    def trim(self, job: Job, latents: torch.Tensor) -> torch.Tensor:
        """Cut the first frames off, which only fill a patch in time."""
        return latents[:, latents.shape[1] - _latent_frames(job.pipe, job.settings) :]

    def decode(self, pipe: Any, latents: torch.Tensor) -> torch.Tensor:
        """Return the video [B, 3, F, H, W] in about -1..1."""
        return pipe.decode_latents(latents)  # type: ignore[no-any-return]

    def noised(self, pipe: Any, clean: torch.Tensor, noise: torch.Tensor) -> States:
        """Return latents at those times of the pipeline's schedule whose noise levels are those of
        `TIMES`.

        Raises:
            SamplingError: The pipeline's scheduler has no such schedule.
        """
        kept = getattr(pipe.scheduler, "alphas_cumprod", None)
        if kept is None:
            expected = "a scheduler with alphas_cumprod, such as CogVideoXDDIMScheduler"
            got, remedy = type(pipe.scheduler).__name__, "Leave out --network-number"
            raise SamplingError("the network number", expected=expected, got=got, remedy=remedy)
        alpha, sigma = kept.double().sqrt().cpu(), (1 - kept.double()).sqrt().cpu()
        flow_times = sigma / (alpha + sigma)
        missing = noise.shape[1] - clean.shape[1]  # the frames that were dropped
        if missing > 0:
            clean = torch.cat([clean[:, :1].expand(-1, missing, -1, -1, -1), clean], 1)
        found: States = []
        for wanted in TIMES:
            step = int((flow_times - wanted).abs().argmin())
            noisy = float(alpha[step]) * clean + float(sigma[step]) * noise
            found.append((noisy.to(pipe.transformer.dtype), step))
        return found


class CogVideoXImage(CogVideoX):
    """`CogVideoXImageToVideoPipeline`: the image's latents are channels beside the noise."""

    NEEDS: ClassVar[tuple[str, ...]] = ("image",)


class ConsisID(CogVideoXImage):
    """`ConsisIDPipeline`: from an image of a face, with what face models made of it."""

    NEEDS: ClassVar[tuple[str, ...]] = ("image", "identity")

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the noise and the identity, in the places that the pipeline has for it."""
        call, identity = super().call_inputs(job), job.conditioning.media["identity"]
        call["id_cond"] = identity["id_cond"]
        call["id_vit_hidden"] = [identity[f"id_vit_hidden.{i}"] for i in range(5)]
        if "face_kps" in identity:
            call["kps_cond"] = identity["face_kps"].tolist()
        return call


class CogVideoXVideo(CogVideoX):
    """`CogVideoXVideoToVideoPipeline`: the video with noise of some step, denoised from there."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {**CogVideoX.DEFAULTS, "strength": 0.8}
    NEEDS: ClassVar[tuple[str, ...]] = ("video",)

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the video. The pipeline draws the noise and adds it.

        Raises:
            SamplingError: CogVideoX 1.5 has no whole number of its patches in time.
        """
        pipe, settings = job.pipe, job.settings
        frames, patch = _latent_frames(pipe, settings), pipe.transformer.config.patch_size_t or 1
        if frames % patch:
            near = (frames - frames % patch - 1) * int(pipe.vae_scale_factor_temporal) + 1
            expected = f"a multiple of {patch} frames of latents"
            got = f"{settings.num_frames}, which are {frames} frames of latents"
            remedy = f"Try --num-frames {near}"
            raise SamplingError("num_frames", expected=expected, got=got, remedy=remedy)
        return self.from_video(job)


def _latent_frames(pipe: Any, settings: Settings) -> int:
    return (settings.num_frames - 1) // int(pipe.vae_scale_factor_temporal) + 1
