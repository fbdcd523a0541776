"""The networks of a tiny pipeline: built, read as a rectified flow, and written to a folder.

Classes, sizes, tokenizer, scheduler and settings are those of a shipped folder, but for what a
recipe changes.

A CogVideoX network predicts v = alpha noise - sigma x0 of a variance-preserving process at whole
times, with the noise schedule of CogVideoX-2B, whose last time is pure noise. Training knows one
flow, x_t = (1 - t) x0 + t noise; the two differ by a scale of the state and a name of the time,
and `CogVideoX.velocity` translates. Its latents are those of the tiny Wan, normalised: one
autoencoder's space, two networks in it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from training.flow import Velocity
from turbo_rcm_patch.files import atomic_folder
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video.rcm_times import rcm_times

SETTINGS_FILE: Final = "turbo_rcm.json"
TEXT_TOKENS: Final = 24
_SPECIAL: Final = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Wan:
    """A Wan: rectified flow, and the rCM sampler with fresh noise in every step.

    Attributes:
        like: The shipped folder.
        changes: What differs from the configuration of a part ("vae", "transformer",
            "text_encoder") or from the "settings" there.
        words: Every word of the prompts.
        tuned: Begin the VAE with the weights of the shipped one.
        renoises: True if the few-step sampler adds fresh noise; False if it follows the flow.
        jitter: Spread of the student's network times in training. Pipelines in bf16 round 1000 t
            to 8 bits (988, 932, 852, 608): the student must not mind.
    """

    like: Path
    changes: Mapping[str, Mapping[str, Any]]
    words: Sequence[str]
    tuned: bool = False
    renoises: ClassVar[bool] = True
    jitter: ClassVar[float] = 0.002

    @cached_property
    def _index(self) -> dict[str, Any]:
        index: dict[str, Any] = DiffusionPipeline.load_config(self.like)
        return index

    def _class(self, part: str) -> Any:
        library, name = self._index[part]
        return getattr(import_module(library), name)

    def _config(self, part: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.like / part / "config.json").read_text())
        return config | dict(self.changes.get(part, {}))

    def build_vae(self) -> Any:
        """Return an autoencoder with random weights or the shipped one's, 4x in time."""
        if self.tuned:
            return self._class("vae").from_pretrained(
                self.like, subfolder="vae", dtype=torch.float32
            )
        vae = self._class("vae").from_config(self._config("vae"))
        # A posterior of unit variance would drown the young encoder.
        nn.init.constant_(vae.quant_conv.bias[vae.config.z_dim :], -6.0)
        return vae

    def build_transformer(self) -> Any:
        """Return a transformer that predicts nothing yet, so that no first step explodes."""
        model = self._class("transformer").from_config(self._config("transformer"))
        nn.init.zeros_(model.proj_out.weight)
        nn.init.zeros_(model.proj_out.bias)
        return model

    def build_text_encoder(self) -> Any:
        """Return a text encoder to be trained with the transformer."""
        kind = self._class("text_encoder")
        return kind(kind.config_class(**self._config("text_encoder")))

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the shipped word-level tokenizer with the words of the prompts."""
        written = json.loads((self.like / "tokenizer" / "tokenizer.json").read_text())
        vocabulary = [*_SPECIAL.values(), *self.words]
        written["model"]["vocab"] = {word: i for i, word in enumerate(vocabulary)}
        tokenizer = Tokenizer.from_str(json.dumps(written))
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=TEXT_TOKENS, **_SPECIAL
        )

    def encode_text(self, encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Embed captions [B, L] exactly as the pipeline does: [B, L, text_dim]."""
        hidden: Tensor = encoder(ids, mask).last_hidden_state
        return hidden * mask[..., None].to(hidden.dtype)

    def velocity(self, transformer: Any, text: Tensor) -> Velocity:
        """Return the network as a rectified flow, for fixed captions [B, L, text_dim]."""
        dtype = transformer.dtype

        def flow(x: Tensor, t: Tensor) -> Tensor:
            v: Tensor = transformer(x.to(dtype), t * 1000.0, text.to(dtype), return_dict=False)[0]
            return v

        return flow

    def times(self, steps: int) -> tuple[float, ...]:
        """Rectified-flow times of the few-step sampler, steps + 1 of them, the last one 0."""
        return tuple(rcm_times(steps).tolist())

    def scheduler(self) -> Any:
        """Return the shipped folder's scheduler."""
        return self._class("scheduler").from_pretrained(self.like, subfolder="scheduler")

    def export(
        self, folder: Path, vae: Any, encoder: Any, transformer: Any, licence: Path | None = None
    ) -> None:
        """Write a pipeline folder, the settings it was trained for, and a licence of its clips.

        The transformer is stored in bf16 but for the parts that diffusers keeps in fp32, so that
        loading in bf16 changes nothing; the autoencoder in fp16, whose finer mantissa suits fp32
        decoding; the text encoder in fp32, because transformers loads a file in its own precision.
        """
        parts: dict[str, Any] = {"text_encoder": copy.deepcopy(encoder).cpu()}
        for name, model, dtype in (
            ("vae", vae, torch.float16), ("transformer", transformer, torch.bfloat16),
        ):  # fmt: skip
            stored = parts[name] = copy.deepcopy(model).cpu()
            stored.register_to_config(_name_or_path="")
            kept = {*(model._keep_in_fp32_modules or ())}
            for key, parameter in stored.named_parameters():
                if not kept & set(key.split(".")):
                    parameter.data = parameter.data.to(dtype)
        pipeline = getattr(import_module("diffusers"), self._index["_class_name"])
        pipe = pipeline(**parts, tokenizer=self.build_tokenizer(), scheduler=self.scheduler())
        settings = json.loads((self.like / SETTINGS_FILE).read_text())
        settings |= self.changes.get("settings", {})
        with atomic_folder(folder, force=True) as written:
            pipe.save_pretrained(written, safe_serialization=True)
            (written / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
            if licence is not None:
                shutil.copy(licence, written)


class CogVideoX(Wan):
    """A CogVideoX: video tokens and 24 of text through every attention; DDIM follows the flow."""

    renoises: ClassVar[bool] = False
    jitter: ClassVar[float] = 0.0

    def build_vae(self) -> Any:
        return self._class("vae").from_config(self._config("vae"))

    def build_text_encoder(self) -> Any:
        """Return a T5, which has the relative positions of umT5's first layer in all layers."""
        encoder = super().build_text_encoder()
        known = transformers.UMT5EncoderModel.from_pretrained(
            TINY_WAN, subfolder="text_encoder", dtype=torch.float32
        ).state_dict()
        encoder.load_state_dict({name: known[name] for name in encoder.state_dict()})
        return encoder

    def encode_text(self, encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
        del mask  # Padding is text like any other.
        hidden: Tensor = encoder(ids)[0]
        return hidden

    def velocity(self, transformer: Any, text: Tensor) -> Velocity:
        config, dtype = transformer.config, transformer.dtype

        def flow(x: Tensor, t: Tensor) -> Tensor:
            t = t[:, None, None, None, None]
            size = (t.square() + (1 - t).square()).sqrt()
            sigma, alpha, state = t / size, (1 - t) / size, x / size  # of variance one
            frames, rows, columns = x.shape[2:]
            grid = frames, rows // config.patch_size, columns // config.patch_size
            v: Tensor = transformer(
                hidden_states=state.transpose(1, 2).to(dtype),  # frames before channels
                encoder_hidden_states=text.to(dtype),
                timestep=self._schedule_time(t.flatten()),
                image_rotary_emb=_rotary(grid, config.attention_head_dim, x.device),
                return_dict=False,
            )[0]
            return (sigma - alpha) * state + (alpha + sigma) * v.transpose(1, 2).float()

        return flow

    def times(self, steps: int) -> tuple[float, ...]:
        scheduler = self.scheduler()
        scheduler.set_timesteps(steps)
        return (*self._flow_times[scheduler.timesteps].tolist(), 0.0)

    @cached_property
    def _flow_times(self) -> Tensor:
        """Rectified-flow time sigma / (alpha + sigma) of the schedule's 1,000 times, fp64."""
        kept: Tensor = self.scheduler().alphas_cumprod.double()
        alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
        return sigma / (alpha + sigma)

    def _schedule_time(self, t: Tensor) -> Tensor:
        """Times of the schedule, with fractions, of rectified-flow times [B]; fp32."""
        table, wanted = self._flow_times.to(t.device), t.double()
        above = torch.searchsorted(table, wanted).clamp(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        return (above - 1 + ((wanted - low) / (high - low)).clamp(0, 1)).float()


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L] int64, padded."""
    tokens = tokenizer(
        texts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    )
    return tokens.input_ids, tokens.attention_mask


@cache
def _rotary(
    grid: tuple[int, int, int], head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    frames, *size = grid
    cos, sin = get_3d_rotary_pos_embed(head_dim, ((0, 0), size), size, frames, device=device)
    return cos, sin
