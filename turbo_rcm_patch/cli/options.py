"""The commands and their options: one dataclass each, from which the command line is made.

The first paragraph of a docstring is the command's line in `--help`, the rest up to `Attributes:`
its description. Nothing here imports torch, so that help and mistakes take no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.errors import ConfigError

DType = Literal["bfloat16", "float16", "float32"]

_HIDDEN: Final = {"hidden": True}
_MODEL: Final = {"metavar": "PATH_OR_ID"}
_FILE: Final = {"metavar": "FILE"}
_CLIPS: Final = {"metavar": "DIR"}


_CONTINUED: Final = (
    "Interrupted. What is finished is kept; the same command without --fresh goes on from there."
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command.

    Attributes:
        interrupted: The text to print on Ctrl-C.
        command_line: The whole command line, for the report.
    """

    interrupted: ClassVar[str] = "Interrupted."
    command_line: str = field(default="", metadata=_HIDDEN)


@dataclass(frozen=True, kw_only=True)
class Model(Command):
    """model

    Attributes:
        model: A Wan or CogVideoX pipeline folder, a hub id, or one of the shipped models "tiny"
            and "tiny-cogvideox".
        lora: A LoRA to load, with its scale (1 without one). May be repeated. Before it,
            `transformer=` (high noise) or `transformer_2=` chooses an expert of Wan 2.2.
    """

    model: str = field(default="tiny", metadata=_MODEL)
    lora: tuple[str, ...] = field(default=(), metadata={"metavar": "PATH_OR_ID[:SCALE]"})


@dataclass(frozen=True, kw_only=True)
class Patched(Model):
    """dtype

    Attributes:
        dtype: dtype of transformer and text encoder; the VAE has float32.
        config: How the model is patched.
    """

    dtype: DType = "bfloat16"
    config: PatchConfig = field(default_factory=PatchConfig, metadata=_HIDDEN)


@dataclass(frozen=True, kw_only=True)
class Run(Patched):
    """prompts, inputs and device

    Attributes:
        prompt: The prompt. May be repeated.
        prompts: File with one prompt per line.
        seed: Seed of the first prompt; the next one uses one more.
        image: First frame of every video, for an image-to-video model.
        device: cpu, cuda or cuda:N. Without it a GPU if there is one.
        offload: Keep only one component (model), one block of a transformer and one layer of the
            rest (group), or one layer (sequential) on the GPU at a time.
        settings: The fields of `Settings` that were given.
    """

    prompt: tuple[str, ...] = field(default=(), metadata={"metavar": "TEXT"})
    prompts: Path | None = field(default=None, metadata=_FILE)
    seed: int = 0
    image: Path | None = field(default=None, metadata=_FILE)
    device: str | None = None
    offload: Literal["none", "model", "group", "sequential"] = "none"
    settings: Mapping[str, Any] = field(default_factory=dict, metadata=_HIDDEN)

    def __post_init__(self) -> None:
        if not self.prompt and self.prompts is None:
            raise ConfigError("prompts", expected="--prompt TEXT or --prompts FILE", got="neither")


@dataclass(frozen=True, kw_only=True)
class Generate(Run):
    """Generate videos with the patched model.

    Writes one mp4 for each prompt, and beside it a .json that says how it was made. If one of
    several prompts fails, the others are still written, and the exit code is 2. Under torchrun
    every process makes its share of the prompts, on the GPU of its number.

    examples:
      turbo-rcm-patch generate --out circle.mp4 \\
          --prompt 'a large red circle moving left on a black background'
      turbo-rcm-patch generate --model PATH --steps 50 \\
          --guidance-scale 5 --offload model --prompt 'a cat on a skateboard' --out outputs/cat
      turbo-rcm-patch generate --model PATH --lora LIGHTX2V.safetensors:0.8 \\
          --prompts prompts.txt --out outputs/many --resume
      torchrun --nproc-per-node 8 -m turbo_rcm_patch generate \\
          --model PATH --prompts prompts.txt --out outputs/many --resume

    Attributes:
        out: An .mp4 file, which is replaced if it is there, or a folder. Videos in a folder that
            were made with other settings are not replaced. Those of the same settings run by one
            plan, its plan-*.json: without it the next video decides anew.
        resume: Keep videos that are there and were made with the same prompt, seed, model path,
            settings, patch and release.
        patch: Patch the model.
        plan: How each block runs: a file that `plan` wrote. Patch options are those of the plan.
        cfg_parallel: Under torchrun: all processes make each video together, and two groups of
            them share the two forwards of a step with guidance.
        ulysses: Under torchrun: so many processes share the tokens of each forward.
    """

    interrupted = "Interrupted. Finished videos are kept; --resume makes only the others."
    out: Path = Path("outputs/generate")
    resume: bool = False
    patch: bool = True
    plan: Path | None = field(default=None, metadata=_FILE)
    cfg_parallel: bool = False
    ulysses: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None and not self.patch:
            raise ConfigError("--plan", expected="a model that is patched", got="--no-patch")

    @property
    def together(self) -> bool:
        """True if all processes make each video together."""
        return self.cfg_parallel or self.ulysses != 1


@dataclass(frozen=True, kw_only=True)
class Compare(Run):
    """Compare the videos before and after patching, and give a verdict.

    Generates every prompt three times from the same noise: unpatched, patched, and unpatched with
    another exact attention backend. Judges whether anything visible changed. The verdict is a
    median over prompts, and one prompt scatters by some 5 dB: give ten. It is "not judged" if most
    blocks did not run what was asked for (the guard made them more exact). Writes videos,
    metrics.json and report.html. If interrupted, the same command continues by the same plan.

    examples:
      turbo-rcm-patch compare --out outputs/circle \\
          --prompt 'a large red circle moving left on a black background'
      turbo-rcm-patch compare --attention int4 --no-guard --prompts prompts.txt  # "changed"
      turbo-rcm-patch compare --model PATH --steps 30 \\
          --offload model --prompts prompts.txt --out outputs/wan
      turbo-rcm-patch compare --model PATH --attention-backend sage \\
          --prompts prompts.txt --out outputs/sage

    Attributes:
        out: Folder for everything.
        fresh: Start again: remove what an earlier comparison wrote into the folder. Other files
            stay.
        network_number: Measure the error of a few network calls against fp32. With --offload
            that cannot be done, and the verdict is at best "undecided".
        attention_backend: Judge this attention backend of diffusers (sage, flash, ...) in place of
            the patch.
        plan: How each block runs: a file that `plan` wrote. Patch options are those of the plan.
    """

    interrupted = _CONTINUED
    out: Path = field(default=Path("outputs/compare"), metadata={"metavar": "DIR"})
    fresh: bool = False
    network_number: bool = True
    attention_backend: str | None = field(default=None, metadata={"metavar": "NAME"})
    plan: Path | None = field(default=None, metadata=_FILE)


@dataclass(frozen=True, kw_only=True)
class Judge(Command):
    """Give the verdict of compare on videos that you have, without a model.

    Pairs the clips of three folders by their names: .mp4 and other videos that ffmpeg reads,
    folders of .png, and .safetensors with a tensor "frames" [F, H, W, 3]. The control holds videos
    of the baseline's model under another exact attention; without it there are numbers and no
    verdict. Save all of them without loss: h264 hides differences beyond some 45 dB. The verdict
    is a median over clips: give ten. Clips that do not fit together or cannot be read are named,
    the others are judged, and the exit code is 2. If it was interrupted, the same command
    continues.

    examples:
      turbo-rcm-patch judge --baseline before --candidate after \\
          --control other_attention --out outputs/judge
      turbo-rcm-patch judge --baseline before.mp4 --candidate after.mp4

    Attributes:
        baseline: Folder with the clips of the unchanged model; or one clip.
        candidate: The same of the changed one.
        control: The same of the unchanged one under another exact attention.
        out: Folder for the report.
        fps: Frames a second of clips that do not say.
        fresh: Start again: remove what an earlier run wrote into the folder. Other files stay.
    """

    interrupted = _CONTINUED
    baseline: Path | None = field(default=None, metadata=_CLIPS)
    candidate: Path | None = field(default=None, metadata=_CLIPS)
    control: Path | None = field(default=None, metadata=_CLIPS)
    out: Path = field(default=Path("outputs/judge"), metadata={"metavar": "DIR"})
    fps: float = 16.0
    fresh: bool = False

    def __post_init__(self) -> None:
        for name in ("baseline", "candidate"):
            if getattr(self, name) is None:
                raise ConfigError(f"--{name}", expected="a folder of clips", got="none")


@dataclass(frozen=True, kw_only=True)
class Plan(Run):
    """Decide once how each block of a model runs, and write it to a file.

    Makes a video of each prompt and keeps none. All blocks are measured on its first, middle and
    last step, and each gets what the hardest of these needs. With this file `generate --plan`,
    `compare --plan`, `demo --plan` and patch_model(model, plan=FILE) measure nothing, and give the
    same bits in every process, whatever it made first.

    examples:
      turbo-rcm-patch plan --model PATH --prompts prompts.txt --out wan.json
      turbo-rcm-patch generate --model PATH --prompts prompts.txt --plan wan.json --out videos

    Attributes:
        out: The file to write, after each prompt.
        resume: Go on with the plan that is there, after the prompts that it was made of.
    """

    interrupted = "Interrupted. --resume goes on after the last finished prompt."
    out: Path = field(default=Path("plan.json"), metadata=_FILE)
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Pairs(Model):
    """List the skip pairs of a model and how each would run.

    The VAE's are among them. No weights are loaded.

    examples:
      turbo-rcm-patch pairs --model tiny
      turbo-rcm-patch pairs --model PATH
    """


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert a TurboDiffusion .pth to a diffusers folder.

    Writes a TurboDiffusion checkpoint (plain or -quant, with or without SLA) as a transformer
    folder of diffusers, or with --base as a whole pipeline with the rCM scheduler. Stock classes
    have no place for proj_l; these are written to turbo_extra.safetensors beside the weights.
    Nothing in a checkpoint is executed. If the conversion fails, nothing is left.

    examples:
      turbo-rcm-patch convert TurboWan2.1-T2V-1.3B-480P.pth turbowan/transformer
      turbo-rcm-patch convert TurboWan2.1-T2V-1.3B-480P-quant.pth turbowan \\
          --base Wan2.1-T2V-1.3B-Diffusers
      turbo-rcm-patch convert TurboWan2.2-I2V-A14B-high-720P.pth turbowan22 \\
          --low-noise TurboWan2.2-I2V-A14B-low-720P.pth --base Wan2.2-I2V-A14B-Diffusers

    Attributes:
        source: The .pth file.
        out: The folder to write.
        base: Diffusers pipeline folder of the same model; makes OUT a whole pipeline.
        low_noise: The second expert of Wan 2.2 A14B; SOURCE is then the high-noise one.
        copy: Copy the base's VAE and text encoder instead of linking to them.
        dtype: dtype of the weights that diffusers does not keep in fp32. Without it the
            checkpoint's.
        heads: Number of attention heads, if a head does not have 128 channels.
        network: The network to take from a file with several, e.g. net_ema.
        int8_only: Write the int8 weights of a -quant checkpoint as they are: OUT is about as large
            as SOURCE; this package loads it, and stock classes refuse it. Without it they are
            multiplied by their scales.
        force: Replace OUT if it exists.
    """

    interrupted = "Interrupted. Nothing was written."
    source: Path = field(metadata={"metavar": "SOURCE"})
    out: Path = field(metadata={"metavar": "OUT"})
    base: Path | None = field(default=None, metadata={"metavar": "FOLDER"})
    low_noise: Path | None = field(default=None, metadata={"metavar": "PTH"})
    copy: bool = False
    dtype: DType | None = None
    heads: int | None = None
    network: str | None = field(default=None, metadata={"metavar": "NAME"})
    int8_only: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("low_noise", "copy"):
            if self.base is None and getattr(self, name):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(option, expected="--base too", got="none")


@dataclass(frozen=True, kw_only=True)
class Precompile(Patched):
    """Fill Triton's cache with the kernels of a model, without a GPU.

    For the image of a container: the first video then compiles nothing. Only configurations are
    read. A cache serves machines with the same release of Triton and of this package, which find
    it at ~/.triton/cache or where TRITON_CACHE_DIR says. What is there is not compiled again.

    examples:
      turbo-rcm-patch precompile --model PATH --gpu sm_90
      turbo-rcm-patch precompile --model PATH --linear int8 --out /opt/triton

    Attributes:
        gpu: Architecture of the GPU: sm_80, sm_86, sm_89, sm_90 (H100, H200), sm_100 or sm_120.
        out: The cache folder. Without it Triton's own.
        height: Height of the videos. Without it the model's usual one, like the next two.
        width: Width of the videos.
        num_frames: Number of frames.
    """

    interrupted = "Interrupted. What is compiled is kept; the same command goes on from there."
    gpu: str = "sm_90"
    out: Path | None = field(default=None, metadata={"metavar": "DIR"})
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Check the installation and the GPU.

    Prints what is installed, what the GPU can run and which kernels would run, and says how to fix
    what is wrong. Exit code 1 if something that is needed is missing.

    examples:
      turbo-rcm-patch doctor
    """


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Compare a shipped model with its patched self; no GPU is needed.

    Generates 10 prompts with a shipped model: unpatched, patched, and unpatched with another exact
    attention. Judges the videos, then runs one attention through the Triton kernels. Exit
    code 0 only if the verdict is "unchanged" and the kernels are right. The guard makes all
    blocks of tiny-cogvideox exact, so that its videos are "not judged".

    examples:
      turbo-rcm-patch demo --out outputs/demo
      turbo-rcm-patch demo --model tiny-cogvideox --out outputs/cogvideox

    Attributes:
        model: "tiny" (the shipped Wan), "tiny-cogvideox", or another model that runs without
            options.
        out: Folder for the report. What an earlier demo or comparison wrote there is removed;
            other files stay.
        resume: Continue an interrupted demo.
        vae: Patch the VAE too (default: on).
        plan: How each block runs: a file that `plan` wrote. Patch options are those of the plan.
    """

    interrupted = (
        "Interrupted. What is finished is kept; the same command with --resume goes on from there."
    )
    model: str = "tiny"
    out: Path = field(default=Path("outputs/demo"), metadata={"metavar": "DIR"})
    resume: bool = False
    vae: bool | None = None
    plan: Path | None = field(default=None, metadata=_FILE)


#: Name of a command -> its options.
COMMANDS: Final[Mapping[str, type[Command]]] = {
    command.__name__.lower(): command
    for command in (Generate, Compare, Judge, Plan, Pairs, Convert, Precompile, Doctor, Demo)
}
