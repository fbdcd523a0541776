"""The tiny models: sizes, networks with random weights, and each network read as a flow.

A CogVideoX network predicts v = alpha noise - sigma x0 of a variance-preserving process at whole
times, with the noise schedule of CogVideoX-2B, whose last time is pure noise. Training knows one
flow, x_t = (1 - t) x0 + t noise; the two differ by a scale of the state and a name of the time,
and `CogVideoX.velocity` translates. Its latents are those of the tiny Wan, normalised: one
autoencoder's space, two networks in it.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
import transformers
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from training.data import Shapes, Source
from training.data import World as WorldSource
from training.flow import Velocity
from training.world import Bucket
from turbo_rcm_patch import keep_int8_only
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.files import atomic_folder
from turbo_rcm_patch.tiny import TINY_COGVIDEOX, TINY_WAN
from turbo_rcm_patch.video.rcm_times import rcm_times

SETTINGS_FILE: Final = "turbo_rcm.json"
_SPECIAL: Final = ("<pad>", "</s>", "<unk>")


@dataclass(frozen=True, slots=True)
class Budget:
    """Steps of a stage, videos or samples a step, and the largest learning rate.

    With `muon` (torch 2.9) the matrices of blocks are trained by Muon, whose steps are scaled to
    the size of AdamW's (arXiv 2502.16982).
    """

    steps: int
    batch: int
    lr: float
    muon: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sizes and budgets of a model.

    With an autoencoder of three levels, which shrinks by 4 in space and in time, 17 frames of
    128 x 128 are 5 x 32 x 32 latents and, with patches of (1, 2, 2), 1,280 tokens.

    Attributes:
        stages: Budgets in the order of training: "vae", "teacher", "student", and "decoder" where
            the autoencoder's decoder is trained once more. Batches are of the first bucket;
            others have as many tokens.
        buckets: Shapes of the clips. The model is made for the first one.
        settings: How the model wants to be sampled, for `turbo_rcm.json`.
        guidance: Classifier-free guidance of the teacher.
        fill: Batches of the teacher before the student's first step.
        refresh: Steps of the student for each new batch of the teacher.
        vae_channels: Of the autoencoder's levels; each but the last halves the picture.
        crop_phase: Share of the autoencoder's steps that see crops.
    """

    stages: Mapping[str, Budget]
    buckets: tuple[Bucket, ...]
    settings: Mapping[str, float | str]
    fill: int
    refresh: int = 6
    guidance: float = 1.5
    crop_phase: float = 0.65
    latent_channels: int = 8
    vae_channels: tuple[int, ...] = (16, 32, 64)
    heads: int = 4
    head_dim: int = 64
    layers: int = 6
    ffn_dim: int = 512
    time_dim: int = 64
    text_dim: int = 128
    text_layers: int = 2
    text_tokens: int = 24

    def latent_shape(self, bucket: Bucket) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of one clip."""
        shrink = 2 ** (len(self.vae_channels) - 1)
        frames, size = (
            (bucket.frames - 1) // 4 + 1,
            (bucket.height // shrink, bucket.width // shrink),
        )
        return self.latent_channels, frames, *size

    def batch(self, stage: str, bucket: Bucket) -> int:
        """Clips of a bucket with as many tokens as the stage's batch of the first one."""
        own, first = (math.prod(self.latent_shape(one)) for one in (bucket, self.buckets[0]))
        return max(1, self.stages[stage].batch * first // own)


class Family:
    """What one tiny model does in its own way.

    Attributes:
        name: Begins the names of the folders that a training writes.
        shipped: Where the package looks for the trained model.
        classes: Names of its pipeline, transformer, text encoder and autoencoder.
        recipe: That of the model that ships.
        renoises: True if its few-step sampler adds fresh noise; False if it follows the flow.
        jitter: Spread of the student's network times in training, in rectified-flow time.
        kept: Modules of the transformer that diffusers keeps in fp32.
        attentions: Name of a zeroed attention in an evaluation -> the blocks' attribute.
        source: Where its clips come from.
        most_bytes: Size of what ships.
        int8: Whether its Linears ship in int8 alone, which this package loads.
    """

    name: str
    shipped: Path
    classes: tuple[str, str, str, str]
    recipe: Recipe
    renoises: bool
    jitter = 0.0
    kept: tuple[str, ...] = ()
    attentions: Mapping[str, str]
    source: type[Source] = Shapes
    most_bytes = 16 * 2**20
    int8 = False

    def __init__(self) -> None:
        pipeline, transformer, encoder, vae = self.classes
        self.pipeline: Any = getattr(diffusers, pipeline)
        self.transformer: Any = getattr(diffusers, transformer)
        self.text_encoder: Any = getattr(transformers, encoder)
        self.vae: Any = getattr(diffusers, vae)

    def build_vae(self, recipe: Recipe) -> Any:
        """Return an autoencoder with random weights, 4x in time."""
        raise NotImplementedError

    def build_transformer(self, recipe: Recipe) -> Any:
        """Return a transformer that predicts nothing yet, so that no first step explodes."""
        model = self._random_transformer(recipe)
        nn.init.zeros_(model.proj_out.weight)
        nn.init.zeros_(model.proj_out.bias)
        return model

    def _random_transformer(self, recipe: Recipe) -> Any:
        raise NotImplementedError

    def build_text_encoder(self, recipe: Recipe) -> Any:
        """Return a text encoder to be trained with the transformer."""
        raise NotImplementedError

    def encode_text(self, encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Embed captions [B, L] exactly as the pipeline does: [B, L, text_dim]."""
        raise NotImplementedError

    def blocks(self, transformer: Any) -> Any:
        """Return the transformer's blocks."""
        return transformer.blocks

    def velocity(self, transformer: Any, text: Tensor) -> Velocity:
        """Return the network as a rectified flow, for fixed captions [B, L, text_dim]."""
        raise NotImplementedError

    def times(self, steps: int) -> tuple[float, ...]:
        """Rectified-flow times of the few-step sampler, steps + 1 of them, the last one 0."""
        raise NotImplementedError

    def scheduler(self) -> Any:
        """Return the scheduler that ships."""
        raise NotImplementedError

    def export(self, folder: Path, recipe: Recipe, vae: Any, encoder: Any, network: Any) -> None:
        """Write a pipeline folder, the settings it was trained for, and licences of artwork.

        The transformer is stored in bf16 but for the parts that diffusers keeps in fp32, so that
        loading in bf16 changes nothing; the autoencoder in fp16, whose finer mantissa suits fp32
        decoding; the text encoder in fp32, because transformers loads a file in its own precision.
        """
        parts = {}
        for name, model, build, dtype, kept in (
            ("vae", vae, self.vae, torch.float16, ()),
            ("transformer", network, self.transformer, torch.bfloat16, self.kept),
        ):
            fresh = parts[name] = build.from_config(model.config)
            fresh.load_state_dict({k: v.cpu().contiguous() for k, v in model.state_dict().items()})
            fresh.register_to_config(_name_or_path="")
            for key, parameter in fresh.named_parameters():
                if not set(kept) & set(key.split(".")):
                    parameter.data = parameter.data.to(dtype)
        encoder = copy.deepcopy(encoder).cpu()
        pipe = self.pipeline(
            **parts,
            tokenizer=build_tokenizer(recipe, self.source.words),
            text_encoder=encoder,
            scheduler=self.scheduler(),
        )
        if self.int8:
            keep_int8_only(pipe.transformer)
        first = recipe.buckets[0]
        shape = {"height": first.height, "width": first.width, "num_frames": first.frames}
        settings = {**shape, **recipe.settings, "max_sequence_length": recipe.text_tokens}
        with atomic_folder(folder, force=True) as made:
            pipe.save_pretrained(made, safe_serialization=True)
            (made / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
            if self.source is WorldSource:
                shutil.copy(Path(__file__).parent / "ARTWORK.md", made)


class Wan(Family):
    """The tiny Wan: rectified flow, and the rCM sampler with fresh noise in every step."""

    name = "wan"
    shipped = TINY_WAN
    classes = ("WanPipeline", "WanTransformer3DModel", "UMT5EncoderModel", "AutoencoderKLWan")
    recipe = Recipe(
        stages={
            "vae": Budget(1520, 16, 1e-3),
            "teacher": Budget(6220, 128, 1e-3),
            "student": Budget(2380, 128, 5e-4),
            "decoder": Budget(1600, 16, 6e-4),
        },
        buckets=(Bucket("square", 17, 128, 128, clips=64, shards=768),),
        settings={"fps": 8, "steps": 4, "sigma_max": 80, "guidance_scale": 1.0},
        fill=48,
    )
    renoises = True
    #: Pipelines in bf16 round 1000 t to 8 bits (988, 932, 852, 608): the student must not mind.
    jitter = 0.002
    attentions: Mapping[str, str] = {"self": "attn1", "cross": "attn2"}
    kept = tuple(diffusers.WanTransformer3DModel._keep_in_fp32_modules)

    def build_vae(self, recipe: Recipe) -> Any:
        levels, channels = recipe.vae_channels, recipe.latent_channels
        vae = self.vae(
            base_dim=levels[0], z_dim=channels, dim_mult=[one // levels[0] for one in levels],
            num_res_blocks=1, temperal_downsample=[False] * (len(levels) - 3) + [True, True],
            latents_mean=[0.0] * channels, latents_std=[1.0] * channels, scale_factor_temporal=4,
            scale_factor_spatial=2 ** (len(levels) - 1),
        )  # fmt: skip
        # A posterior of unit variance would drown the young encoder.
        nn.init.constant_(vae.quant_conv.bias[channels:], -6.0)
        return vae

    def _random_transformer(self, recipe: Recipe) -> Any:
        return self.transformer(
            patch_size=(1, 2, 2), num_attention_heads=recipe.heads,
            attention_head_dim=recipe.head_dim, in_channels=recipe.latent_channels,
            out_channels=recipe.latent_channels, text_dim=recipe.text_dim, freq_dim=256,
            ffn_dim=recipe.ffn_dim, num_layers=recipe.layers, cross_attn_norm=True,
            rope_max_seq_len=64,
        )  # fmt: skip

    def build_text_encoder(self, recipe: Recipe) -> Any:
        return self.text_encoder(transformers.UMT5Config(**_text_sizes(recipe)))

    def encode_text(self, encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = encoder(ids, mask).last_hidden_state
        return hidden * mask[..., None].to(hidden.dtype)

    def velocity(self, transformer: Any, text: Tensor) -> Velocity:
        dtype = transformer.dtype

        def field(x: Tensor, t: Tensor) -> Tensor:
            found: Tensor = transformer(
                x.to(dtype), t * 1000.0, text.to(dtype), return_dict=False
            )[0]
            return found

        return field

    def times(self, steps: int) -> tuple[float, ...]:
        return tuple(rcm_times(steps).tolist())

    def scheduler(self) -> Any:
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)


class World(Wan):
    """A Wan of a recorded world: heads of 128 channels, a VAE of 8 x 8 x 4, Linears in int8."""

    name = "world"
    shipped = TINY_WAN.with_name("world")
    recipe = Recipe(
        stages={
            "vae": Budget(4000, 2, 1e-3),
            "teacher": Budget(8000, 128, 1e-3, muon=True),
            "student": Budget(3000, 128, 4e-4),
            "decoder": Budget(1500, 2, 6e-4),
        },
        buckets=(
            Bucket("short", 17, 192, 320, clips=32, shards=320, share=0.7),
            Bucket("long", 81, 240, 416, clips=8, shards=32, share=0.2),
            Bucket("large", 41, 480, 832, clips=4, shards=32, share=0.1),
        ),
        settings={"fps": 16, "steps": 4, "sigma_max": 80, "guidance_scale": 1.0}, fill=48,
        guidance=2.5, crop_phase=0.85, latent_channels=16, vae_channels=(16, 32, 64, 64), heads=3,
        head_dim=128, ffn_dim=768,
    )  # fmt: skip
    source = WorldSource
    most_bytes = 20 * 2**20
    int8 = True

    def build_vae(self, recipe: Recipe) -> Any:
        """Return one whose convolutions keep the size of what they see, and begin without biases.

        As torch draws them each level loses part of the picture and adds a constant. Through four
        levels hardly more than the constants is left, and the decoder learns to do without.
        """
        vae = super().build_vae(recipe)
        for module in vae.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                # The last one has the young posterior's variance in its bias.
                if module.bias is not None and module is not vae.quant_conv:
                    nn.init.zeros_(module.bias)
        return vae


class CogVideoX(Family):
    """The tiny CogVideoX: 1,280 video tokens and 24 of text through every attention."""

    name = "cogvideox"
    shipped = TINY_COGVIDEOX
    classes = (
        "CogVideoXPipeline", "CogVideoXTransformer3DModel", "T5EncoderModel",
        "AutoencoderKLCogVideoX",
    )  # fmt: skip
    recipe = Recipe(
        stages={
            "vae": Budget(2000, 8, 1e-3),
            "teacher": Budget(7880, 128, 1e-3),
            "student": Budget(1520, 128, 5e-4),
        },
        settings={"sampler": "scheduler", "fps": 8, "steps": 4, "guidance_scale": 1.0},
        buckets=(Bucket("square", 17, 128, 128, clips=64, shards=384),), fill=32, layers=5,
    )  # fmt: skip
    renoises = False  # DDIM follows the flow
    attentions: Mapping[str, str] = {"joint": "attn1"}

    def build_vae(self, recipe: Recipe) -> Any:
        levels = len(recipe.vae_channels)
        return self.vae(
            down_block_types=("CogVideoXDownBlock3D",) * levels,
            up_block_types=("CogVideoXUpBlock3D",) * levels,
            block_out_channels=recipe.vae_channels, latent_channels=recipe.latent_channels,
            layers_per_block=1, norm_num_groups=8, sample_height=recipe.buckets[0].height,
            sample_width=recipe.buckets[0].width,
            scaling_factor=1.0,  # the space it is taught is normalised already
        )  # fmt: skip

    def _random_transformer(self, recipe: Recipe) -> Any:
        _, frames, rows, columns = recipe.latent_shape(recipe.buckets[0])
        return self.transformer(
            num_attention_heads=recipe.heads, attention_head_dim=recipe.head_dim,
            in_channels=recipe.latent_channels, out_channels=recipe.latent_channels,
            time_embed_dim=recipe.time_dim, text_embed_dim=recipe.text_dim,
            num_layers=recipe.layers, sample_height=rows, sample_width=columns,
            sample_frames=4 * (frames - 1) + 1, max_text_seq_length=recipe.text_tokens,
            use_rotary_positional_embeddings=True,
        )  # fmt: skip

    def build_text_encoder(self, recipe: Recipe) -> Any:
        # T5 has the relative positions of umT5's first layer in all of its layers.
        sizes = _text_sizes(recipe) | {"feed_forward_proj": "gated-gelu"}
        encoder = self.text_encoder(transformers.T5Config(**sizes))
        known = transformers.UMT5EncoderModel.from_pretrained(
            TINY_WAN, subfolder="text_encoder", dtype=torch.float32
        ).state_dict()
        encoder.load_state_dict({name: known[name] for name in encoder.state_dict()})
        return encoder

    def encode_text(self, encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
        del mask  # Padding is text like any other.
        hidden: Tensor = encoder(ids)[0]
        return hidden

    def blocks(self, transformer: Any) -> Any:
        return transformer.transformer_blocks

    def velocity(self, transformer: Any, text: Tensor) -> Velocity:
        own, dtype = transformer.config, transformer.dtype

        def field(x: Tensor, t: Tensor) -> Tensor:
            sigma, alpha = t, 1 - t
            size = (sigma.square() + alpha.square()).sqrt()
            sigma, alpha, size = (one[:, None, None, None, None] for one in (sigma, alpha, size))
            sigma, alpha = sigma / size, alpha / size
            state = x / size  # of variance one, as the schedule has it
            frames, rows, columns = x.shape[2:]
            grid = frames, rows // own.patch_size, columns // own.patch_size
            v: Tensor = transformer(
                hidden_states=state.transpose(1, 2).to(dtype),  # frames before channels
                encoder_hidden_states=text.to(dtype),
                timestep=_schedule_time(t),
                image_rotary_emb=_rotary((*grid, own.attention_head_dim), x.device),
                return_dict=False,
            )[0]
            return (sigma - alpha) * state + (alpha + sigma) * v.transpose(1, 2).float()

        return field

    def times(self, steps: int) -> tuple[float, ...]:
        own = self.scheduler()
        own.set_timesteps(steps)
        return (*_flow_times(torch.device("cpu"))[own.timesteps].tolist(), 0.0)

    def scheduler(self) -> Any:
        return diffusers.CogVideoXDDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=True, prediction_type="v_prediction", rescale_betas_zero_snr=True,
            snr_shift_scale=3.0, timestep_spacing="trailing",
        )  # fmt: skip


FAMILIES: Final = {"wan": Wan, "cogvideox": CogVideoX, "world": World}


def small(recipe: Recipe, steps: int = 4) -> Recipe:
    """Return the same model small enough to train a few steps in a unit test."""
    joint = "sampler" in recipe.settings
    return replace(
        recipe,
        stages={
            name: replace(one, steps=steps, batch=4 if name in ("teacher", "student") else 2)
            for name, one in recipe.stages.items()
        },
        buckets=tuple(
            replace(one, frames=9, height=32, width=32 * (1 + i), clips=2, shards=4)
            for i, one in enumerate(recipe.buckets)
        ),
        fill=3, crop_phase=0.5,
        vae_channels=(8, 8, 8 if joint else 16, 16)[: len(recipe.vae_channels)], heads=1, layers=1,
        ffn_dim=64, time_dim=16,
        # That of CogVideoX starts from the tiny Wan's.
        text_dim=recipe.text_dim if joint else 64,
    )  # fmt: skip


def family_of_folder(folder: Path) -> Family:
    """Return the family whose trained pipeline a folder holds.

    Raises:
        ModelFolderError: It is not the folder of a trained pipeline.
    """
    index = folder / "model_index.json"
    if not (folder / SETTINGS_FILE).is_file() or not index.is_file():
        raise ModelFolderError(
            "model", expected=f"a folder with {SETTINGS_FILE} and {index.name}", got=str(folder),
            remedy="Train it first",
        )  # fmt: skip
    if '"CogVideoXPipeline"' in index.read_text():
        return CogVideoX()
    return World() if (folder / "ARTWORK.md").is_file() else Wan()


def build_tokenizer(recipe: Recipe, words: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the words of a grammar, in lower case, without punctuation."""
    vocabulary = {word: i for i, word in enumerate((*_SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^a-z ]+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=recipe.text_tokens,
    )  # fmt: skip


def tokenize(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L] int64, padded to `length`."""
    tokens = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    return tokens.input_ids, tokens.attention_mask


def _text_sizes(recipe: Recipe) -> dict[str, Any]:
    return {
        "vocab_size": 64, "d_model": recipe.text_dim, "d_kv": 32, "num_heads": 4,
        "d_ff": recipe.text_dim * 5 // 2, "num_layers": recipe.text_layers, "dropout_rate": 0.0,
        "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


@cache
def _flow_times(device: torch.device) -> Tensor:
    """Rectified-flow time sigma / (alpha + sigma) of CogVideoX's 1,000 times, fp64."""
    kept: Tensor = CogVideoX().scheduler().alphas_cumprod.double().to(device)
    alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
    return sigma / (alpha + sigma)


def _schedule_time(t: Tensor) -> Tensor:
    """Times of CogVideoX's schedule, with fractions, of rectified-flow times [B]; fp32."""
    table = _flow_times(t.device)
    wanted = t.double()
    above = torch.searchsorted(table, wanted).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    return (above - 1 + ((wanted - low) / (high - low)).clamp(0, 1)).float()


@cache
def _rotary(grid: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    frames, rows, columns, head_dim = grid
    cos, sin = get_3d_rotary_pos_embed(
        head_dim, ((0, 0), (rows, columns)), (rows, columns), frames, device=device
    )
    return cos, sin
