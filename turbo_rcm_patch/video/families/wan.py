"""diffusers' Wan pipelines: rectified flow, with one expert or two; from text, from an image, and
from a video. And those of its relatives, VACE, Animate, SkyReels-V2 and ChronoEdit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from PIL import Image

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.families import Job, PipelineFamily, States, draw
from turbo_rcm_patch.video.measures import TIMES
from turbo_rcm_patch.video.scheduler import RCMScheduler
from turbo_rcm_patch.video.settings import WAN_OWN, Settings

if TYPE_CHECKING:
    from turbo_rcm_patch.video.generation import Conditioning


class Wan(PipelineFamily):
    """`WanPipeline`: from text alone."""

    OWN: ClassVar[Mapping[str, object]] = WAN_OWN

    def latent_shape(
        self, pipe: Any, settings: Settings, conditioning: Conditioning | None = None
    ) -> tuple[int, ...]:
        """Return [1, C, F, H, W]."""
        network = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
        space, span = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        patch = network.config.patch_size
        return (
            1,
            network.config.out_channels,
            (settings.num_frames - 1) // span + 1,
            settings.height // (space * patch[1]) * patch[1],
            settings.width // (space * patch[2]) * patch[2],
        )

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the noise in fp32, scaled for a few-step sampler: the pipelines do neither."""
        pipe, settings = job.pipe, job.settings
        # The pipelines round a number that their VAE cannot make to another one.
        assert settings.num_frames == self.frames_made(pipe, settings.num_frames)
        noise = draw(self.latent_shape(pipe, settings, job.conditioning), job.seed)
        if isinstance(pipe.scheduler, RCMScheduler):
            noise = pipe.scheduler.init_noise(noise)
        return {
            "latents": noise.to(torch.float32),
            "guidance_scale_2": settings.guidance_scale_2,
            "num_frames": settings.num_frames,
        }

    def decode(self, pipe: Any, latents: torch.Tensor) -> torch.Tensor:
        """Return the video [B, 3, F, H, W] in about -1..1."""
        mean, std = self.scales(pipe, latents)
        video = pipe.vae.decode(latents * std + mean, return_dict=False)
        return video[0]  # type: ignore[no-any-return]

    @staticmethod
    def scales(pipe: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation [1, C, 1, 1, 1] of the VAE's latents."""
        config = pipe.vae.config
        mean, std = (like.new_tensor(x) for x in (config.latents_mean, config.latents_std))
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)

    def noised(self, pipe: Any, clean: torch.Tensor, noise: torch.Tensor) -> States:
        """Return (1 - t) clean + t noise."""
        return [((1.0 - t) * clean + t * noise, 1000.0 * t) for t in TIMES]


class WanImage(Wan):
    """`WanImageToVideoPipeline`: 2.1 with CLIP's embeddings of the image, 2.2 with two experts,
    and TI2V, where the image is the first latent frame."""

    NEEDS: ClassVar[tuple[str, ...]] = ("image",)
    MAY: ClassVar[tuple[str, ...]] = ("last_image",)

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the noise.

        Raises:
            SamplingError: The model takes one image and there are two, or the other way round.
        """
        pipe = job.pipe
        network = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
        clip = network.config.image_dim is not None
        two = clip and network.config.pos_embed_seq_len is not None
        one = pipe.config.expand_timesteps or (clip and not two)
        given = "last_image" in job.conditioning.media
        if (given and one) or (two and not given):
            expected = "none, because this model takes the first frame alone"
            remedy = "Leave it out, or load an FLF2V model"
            if two:
                expected = "one, because this model was trained with a first and a last frame"
                remedy = "Give --last-image FILE"
            got = "one" if given else "none"
            raise SamplingError("last_image", expected=expected, got=got, remedy=remedy)
        return super().call_inputs(job)


class WanVideo(Wan):
    """`WanVideoToVideoPipeline`: the video with noise of some step, denoised from there."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {"strength": 0.8}
    NEEDS: ClassVar[tuple[str, ...]] = ("video",)

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the video. The pipeline draws the noise, of the same numbers, and adds it."""
        return self.from_video(job)


class Vace(Wan):
    """`WanVACEPipeline`: from text, with a video, its mask, and images of things to show."""

    MAY: ClassVar[tuple[str, ...]] = ("video", "mask", "reference")

    def before_video(self, conditioning: Conditioning | None) -> int:
        """Return how many frames of latents come before those of the video."""
        return 0 if conditioning is None else len(conditioning.media.get("reference", ()))

    def latent_shape(
        self, pipe: Any, settings: Settings, conditioning: Conditioning | None = None
    ) -> tuple[int, ...]:
        """Return [1, C, F, H, W], the references before the video."""
        one, channels, frames, *size = super().latent_shape(pipe, settings)
        return (one, channels, frames + self.before_video(conditioning), *size)

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return noise and images in the video's size: the pipeline keeps the shape of a video.

        Raises:
            SamplingError: There is a mask and no video.
        """
        conditioning, settings = job.conditioning, job.settings
        given, size = conditioning.media, (settings.width, settings.height)
        call = super().call_inputs(job)
        if "mask" in given and "video" not in given:
            expected, remedy = (
                "a video that it belongs to",
                "Give --video FILE, from Python video=",
            )
            raise SamplingError("mask", expected=expected, got="none", remedy=remedy)
        if "video" in given:
            call["video"] = [x.resize(size) for x in conditioning.frames("video", settings)]
        if "mask" in given:
            one = given["mask"] * settings.num_frames if len(given["mask"]) == 1 else None
            masks = one or conditioning.frames("mask", settings)
            call["mask"] = [x.resize(size, Image.Resampling.NEAREST) for x in masks]
        if "reference" in given:
            call["reference_images"] = given["reference"]
        return call

    def trim(self, job: Job, latents: torch.Tensor) -> torch.Tensor:
        """Cut the references off."""
        return latents[:, :, self.before_video(job.conditioning) :]

    def noised(self, pipe: Any, clean: torch.Tensor, noise: torch.Tensor) -> States:
        """Return (1 - t) clean + t noise, with the first frame in the place of references."""
        more = noise.shape[2] - clean.shape[2]
        whole = torch.cat([clean[:, :, :1].expand(-1, -1, more, -1, -1), clean], dim=2)
        return super().noised(pipe, whole, noise)


class Animate(Vace):
    """`WanAnimatePipeline`: the person of an image moves as the one of a pose video, with the face
    of another; or replaces the person of a video. One segment, as long as the video."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "height": 720, "width": 1280, "num_frames": 77, "fps": 30
    }  # fmt: skip
    OWN: ClassVar[Mapping[str, object]] = {"steps": 20, "guidance_scale": 1.0}
    NEEDS: ClassVar[tuple[str, ...]] = ("image", "pose", "face")
    MAY: ClassVar[tuple[str, ...]] = ("background", "mask")

    def before_video(self, conditioning: Conditioning | None) -> int:
        """Return 1, for the image's frame."""
        return 1

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return poses and faces; the pipeline makes as many frames as there are poses.

        Raises:
            SamplingError: There is a mask without a background, or the other way round.
        """
        conditioning, settings = job.conditioning, job.settings
        given, size = conditioning.media, (settings.width, settings.height)
        replaces = "background" in given
        if replaces != ("mask" in given):
            name, got = "mask" if replaces else "background", "one of them"
            expected = "a background and a mask (white where the person is put), or neither"
            remedy = "Give --background FILE and --mask FILE"
            raise SamplingError(name, expected=expected, got=got, remedy=remedy)
        latents = Wan.call_inputs(self, job)["latents"]
        call = {"latents": latents, "segment_frame_length": settings.num_frames}
        names = {"pose": "pose_video", "face": "face_video"}
        if replaces:
            call["mode"] = "replace"
            names |= {"background": "background_video", "mask": "mask_video"}
        for name, theirs in names.items():
            images = conditioning.frames(name, settings)
            if name == "mask":
                images = [x.resize(size, Image.Resampling.NEAREST).convert("L") for x in images]
            call[theirs] = images
        return call

    def trim(self, job: Job, latents: torch.Tensor) -> torch.Tensor:
        """Cut the image's frame off, and undo the scale that the pipeline has put on for its
        VAE."""
        latents = super().trim(job, latents)
        mean, std = self.scales(job.pipe, latents)
        return (latents - mean) / std


class SkyReels(Wan):
    """`SkyReelsV2Pipeline`: from text alone."""

    FEW_STEPS: ClassVar[bool] = False
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "height": 544, "width": 960, "num_frames": 97, "fps": 24
    }  # fmt: skip
    OWN: ClassVar[Mapping[str, object]] = {"steps": 50, "guidance_scale": 6.0}

    def call_inputs(self, job: Job) -> dict[str, object]:
        """Return the noise; the pipeline has one expert."""
        call = super().call_inputs(job)
        del call["guidance_scale_2"]
        return call


class ChronoEdit(SkyReels):
    """`ChronoEditPipeline`: from the image that is edited, without temporal reasoning."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {}
    OWN: ClassVar[Mapping[str, object]] = WAN_OWN
    NEEDS: ClassVar[tuple[str, ...]] = ("image",)
