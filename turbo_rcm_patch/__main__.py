"""The command line: arguments only. `python -m turbo_rcm_patch --help` lists what it does."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, get_args

from turbo_rcm_patch.config import (
    Attention,
    Form,
    Impl,
    Linear,
    PatchConfig,
    PVDType,
)
from turbo_rcm_patch.errors import ConfigError
from turbo_rcm_patch.exit_codes import CHANGED, OK, TABLE, USAGE, run_command
from turbo_rcm_patch.usage import add_options

#: What `pip install .` brings, whose absence deserves a line and not a traceback.
NEEDED = ("torch", "triton", "diffusers", "safetensors")


#: What the shipped models understand, for the examples of `--help`.
_PROMPT: Final = "a large red circle moving left on a black background"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        One of `exit_codes`, whose `TABLE` says what they mean.
    """
    parser = _parser()
    given = sys.argv[1:] if argv is None else list(argv)
    if not given:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        arguments = parser.parse_args(given)
    except SystemExit as stop:  # argparse has printed help or a usage error
        return int(stop.code or 0)
    arguments.command_line = shlex.join(["python", "-m", "turbo_rcm_patch", *given])

    def run() -> int:
        try:
            return _run(arguments)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in NEEDED:
                raise
            print(
                f"{error.name} is not installed for {sys.executable}\n"
                "  Run `pip install .` in the repository; after `make demo`, "
                "`. .venv/bin/activate`.",
                file=sys.stderr,
            )
            return USAGE

    interrupted = "Interrupted."
    if arguments.run == "generate":
        interrupted += " Finished videos are kept; --resume makes only the others."
    if arguments.run == "demo":
        again = arguments.command_line.removesuffix(" --resume") + " --resume"
        interrupted = f"Interrupted. What is finished is kept; `{again}` goes on from there."
    return run_command(run, interrupted=interrupted)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.run == "demo":
        from turbo_rcm_patch.demo import demo

        return demo(
            Path(arguments.out),
            model=arguments.model,
            fresh=not arguments.resume,
            command=arguments.command_line,
        )
    if arguments.run == "doctor":  # It has to run where packages are missing.
        from turbo_rcm_patch.video.doctor import examine

        return OK if examine(partial(print, flush=True)).healthy else CHANGED
    if arguments.run in ("generate", "compare") and not (arguments.prompt or arguments.prompts):
        # Here, because the imports below take seconds.
        raise ConfigError("prompts", expected="--prompt TEXT or --prompts FILE", got="neither")
    from turbo_rcm_patch.video import commands

    code: int = getattr(commands, arguments.run)(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turbo_rcm_patch",
        description="Run the attention of Wan and CogVideoX video models in fused int8 kernels, "
        "and check whether the videos changed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples(
            "demo",
            f"compare --model tiny --prompt '{_PROMPT}'",
            "compare --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --sampler scheduler --steps 30 \\\n"
            "    --prompts prompts.txt --out outputs/wan",
        )
        + f"\n\n{TABLE}",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (text, description, epilog, add) in _commands().items():
        command = commands.add_parser(
            name,
            help=text,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter
            if epilog
            else argparse.HelpFormatter,
        )
        command.set_defaults(run=name)
        add(command)
    return parser


def _one_of(kind: object) -> str:
    return "{" + ",".join(get_args(kind)) + "}"


def _commands() -> dict[str, tuple[str, str, str, Callable[[argparse.ArgumentParser], None]]]:
    """Name -> (help, description, examples, what adds the options)."""
    return {
        "generate": (
            "generate videos with the patched model",
            "Generate one mp4 for each prompt with the patched model. Under torchrun every "
            "process takes its share of the prompts, on the GPU of its number; with --ulysses or "
            "--ring every group of processes, which split each video. If one of several prompts "
            "fails, the others are still written, and the exit code is 2.",
            _examples(
                f"generate --prompt '{_PROMPT}' --out circle.mp4",
                "generate --model PATH --sampler scheduler --steps 50 --guidance-scale 5 \\\n"
                "    --offload model --prompt 'a cat on a skateboard' --out outputs/cat",
                "generate --model PATH --prompts prompts.txt --out outputs/many --resume",
            )
            + "\n  torchrun --nproc-per-node 8 -m turbo_rcm_patch generate \\\n"
            "      --model PATH --prompts prompts.txt --out outputs/many --resume",
            _add_generate,
        ),
        "compare": (
            "compare the videos before and after patching, and give a verdict",
            "Generate every prompt three times from the same noise: unpatched, patched, "
            "and unpatched with another exact attention backend. Judge whether anything visible "
            "changed. The verdict is a median over prompts, and one prompt scatters by some 5 dB: "
            "give ten. Writes videos, plots, metrics.json, report.html and report.md. If it was "
            "interrupted, the same command continues. Under torchrun the processes share the "
            "sampling, the first writes, and all exit with the verdict. Exit code 0: unchanged, "
            "4: similar, 1: changed or undecided, 2: a mistake in the arguments, the model or the "
            "files, 3: an unexpected error, 130: interrupted, 143: ended by SIGTERM.",
            _examples(
                f"compare --prompt '{_PROMPT}' --out outputs/circle",
                f"compare --prompt '{_PROMPT}' --attention int4   # shows what fails",
                "compare --model PATH --sampler scheduler --steps 30 --offload model \\\n"
                "    --prompts prompts.txt --out outputs/wan",
            )
            + "\n  torchrun --nproc-per-node 2 -m turbo_rcm_patch compare --ulysses 2 \\\n"
            "      --model PATH --prompts prompts.txt --out outputs/wan",
            _add_compare,
        ),
        "pairs": (
            "list the skip pairs of a model and how each would run",
            "List every skip pair of a model and how it would run.",
            _examples("pairs --model tiny", "pairs --model PATH"),
            _add_pairs,
        ),
        "convert": (
            "convert a TurboDiffusion .pth to a diffusers folder, and back",
            "Write a TurboDiffusion checkpoint (plain or -quant, with or without SLA) as a "
            "transformer folder of diffusers, or with --base as a whole pipeline with the rCM "
            "scheduler. Stock classes have no place for proj_l and int8 weights; these are "
            "written to turbo_extra.safetensors beside the weights. Nothing in a checkpoint is "
            "executed. If the conversion fails, nothing is left behind.",
            _examples(
                "convert TurboWan2.1-T2V-1.3B-480P.pth turbowan/transformer",
                "convert TurboWan2.1-T2V-1.3B-480P-quant.pth turbowan \\\n"
                "    --base Wan2.1-T2V-1.3B-Diffusers",
                "convert TurboWan2.2-I2V-A14B-high-720P.pth turbowan22 \\\n"
                "    --low-noise TurboWan2.2-I2V-A14B-low-720P.pth "
                "--base Wan2.2-I2V-A14B-Diffusers",
                "convert --back turbowan back.pth",
            ),
            _add_convert,
        ),
        "doctor": (
            "check the installation and the GPU",
            "Print what is installed, what the GPU can run and which kernels would run, and say "
            "how to fix what is wrong. Exit code 1 if something that is needed is missing.",
            "",
            lambda _: None,
        ),
        "demo": (
            "compare a shipped model with its patched self; no GPU is needed",
            "Generate 10 prompts with a shipped model: unpatched, patched, and unpatched with "
            "another exact attention. Judge the videos, then run one block of the model through "
            "the Triton kernels. Exit code 0 only if nothing visible changed and the kernels are "
            "right, 4 if the videos are only similar, else 1, 2 for a mistake, 3 for an "
            "unexpected error.",
            _examples(
                "demo --out outputs/demo", "demo --model tiny-cogvideox --out outputs/cogvideox"
            ),
            _add_demo,
        ),
    }


def _add_generate(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    _add_sampling(command)
    options = {
        "--out PATH": "an .mp4 file, which is replaced if it is there, or a folder (default: "
        "%(default)s)",
        "--resume": "keep videos that are there and were made with the same prompt, seed, model "
        "path, settings, patch and release. What a video was made from is written beside it, in a "
        ".json",
        "--no-patch": "do not patch the model",
    }
    add_options(command, options, out="outputs/generate")
    _add_patch(command)


def _add_compare(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    _add_sampling(command)
    options = {
        "--out DIR": "folder for everything (default: %(default)s)",
        "--fresh": "start again: replace what an earlier compare wrote into DIR, remove the rest "
        "of it when done, and keep other files",
    }
    add_options(command, options, out="outputs/compare")
    command.add_argument(
        "--network-number",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="measure the error of one network call against fp32, block by block. By default it "
        'is measured; with --offload it cannot be, and the verdict is "undecided". '
        "--no-network-number gives a verdict without this number",
    )
    _add_patch(command)


def _add_pairs(command: argparse.ArgumentParser) -> None:
    options = {
        "--model PATH_OR_ID": "a Wan or CogVideoX pipeline folder, a hub id, 'tiny' or "
        "'tiny-cogvideox'",
    }
    add_options(command, options, model="tiny")


def _add_convert(command: argparse.ArgumentParser) -> None:
    options = {
        "source SOURCE": "a .pth file or a folder of torch.distributed.checkpoint; with --back a "
        "folder",
        "out OUT": "folder to write; with --back the .pth file",
        "--base FOLDER": "diffusers pipeline folder of the same model; makes OUT a whole pipeline",
        "--low-noise PTH": "the second expert of Wan 2.2 A14B; SOURCE is then the high-noise one",
        "--copy": "copy the base's VAE and text encoder instead of linking to them",
        "--dtype {bfloat16,float16,float32}": "dtype of weights that diffusers does not keep in "
        "fp32 (default: the checkpoint's)",
        "--heads N": "number of attention heads, if a head does not have 128 channels",
        "--network NAME": "which network to take from a file with several, e.g. net_ema "
        "(default: the one that is not an average)",
        "--int8-only": "write the int8 weights of a -quant checkpoint alone: OUT is about as "
        "large as SOURCE; this package loads it, and stock classes refuse it",
        "--back": "convert a folder back to a .pth",
        "--force": "replace an existing OUT",
    }
    add_options(command, options)


def _add_demo(command: argparse.ArgumentParser) -> None:
    options = {
        "--model NAME": "'tiny' (the shipped Wan, default), 'tiny-cogvideox', or a folder with "
        "such a model",
        "--out DIR": "folder for the report; files that an earlier demo or compare wrote there "
        "are replaced, and removed when this one is done; others are kept (default: %(default)s)",
        "--resume": "continue an interrupted demo",
    }
    add_options(command, options, out="outputs/demo")


def _add_model(command: argparse.ArgumentParser) -> None:
    options = {
        "--model PATH_OR_ID": "a Wan or CogVideoX pipeline folder, a hub id, or one of the "
        "shipped models 'tiny' and 'tiny-cogvideox' (default: %(default)s)",
        "--dtype {bfloat16,float16,float32}": "dtype of transformer and text encoder; the VAE "
        "has float32 (default: %(default)s)",
        "--device DEVICE": "cpu, cuda or cuda:N (default: a GPU if there is one)",
        "--offload {none,model,group,sequential}": "keep only one component (model), one block "
        "of a transformer and one layer of the rest (group), or one layer (sequential) on the "
        "GPU at a time",
    }
    group = command.add_argument_group("model")
    add_options(group, options, model="tiny", dtype="bfloat16", offload="none")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    options = {
        "--prompt TEXT ...": "prompt; may be repeated",
        "--prompts FILE": "file with one prompt per line. After a tab a line may name an image "
        "or a video of its own, relative to the file",
        "--image FILE": "first frame of every video, for an image-to-video model",
        "--last-image FILE": "last frame of every video, for a model that was trained with one",
        "--video FILE": "video to begin with, for a video-to-video pipeline; for VACE its control",
        "--mask FILE": "for VACE: a video or an image, white where --video is made anew; for "
        "Animate a video, white where the person is put",
        "--reference FILE ...": "for VACE: image of what the video shows; may be repeated",
        "--pose FILE": "for Animate: video of drawn poses",
        "--face FILE": "for Animate: video of the face",
        "--background FILE": "for Animate: video whose person is replaced, with --mask",
        "--identity FILE": "for ConsisID: .safetensors of what its face models made of --image",
        "--strength S": "how much of --video is made anew: this share of the steps runs "
        "(default for video-to-video pipelines: 0.8)",
        "--seed N": "seed of the first prompt; the next one uses N + 1 (default: 0)",
        "--sampler {rcm,scheduler}": "rcm: 1 to 4 steps of a distilled model; scheduler: the "
        "pipeline's own scheduler (default: rcm; CogVideoX has only scheduler)",
        "--steps N": "denoising steps (default: 4 for rcm, 50 for scheduler)",
        "--form {sde,ode}": "form of the rCM sampler (default: sde)",
        "--sigma-max S": "largest noise level of the rCM sampler (default: 80; 200 for Wan 2.2 "
        "I2V)",
        "--height N": "height in pixels, a multiple of 16 (of 32 for Wan 2.2 TI2V; default: "
        "the model's)",
        "--width N": "width in pixels, likewise",
        "--num-frames N": "number of frames (default: the model's)",
        "--fps N": "frames per second of the mp4 (default: the model's)",
        "--max-sequence-length N": "prompt tokens: longer prompts are cut, shorter ones padded",
        "--guidance-scale S": "for --sampler scheduler (default: the model's, 5 for Wan)",
        "--guidance-scale-2 S": "guidance scale of Wan 2.2's low-noise expert",
        "--negative-prompt TEXT": "what the video should not show",
    }
    group = command.add_argument_group(
        "sampling", "Defaults come from turbo_rcm.json in the model's folder, if there is one."
    )
    add_options(group, options, prompt=[], seed=0)


def _add_patch(command: argparse.ArgumentParser) -> None:
    options = {
        f"--attention {_one_of(Attention)}": "how attention runs (default: %(default)s)",
        f"--pv {_one_of(PVDType)}": "element type of probabilities and values (default: "
        "%(default)s)",
        f"--linear {_one_of(Linear)}": "how the Linears of fused pairs run (default: %(default)s)",
        f"--impl {_one_of(Impl)}": "Triton kernels or plain torch; auto: kernels on a GPU, torch "
        "elsewhere (default: %(default)s)",
        f"--pair-form {_one_of(Form)}": "self-attention, projection and skip in one launch, or "
        "the skip after the projection (default: %(default)s)",
        "--no-guard": "do not compare blocks with their authors' code while running",
        "--fidelity R": "target for the network's error, in units of the unpatched network's; "
        "the guard makes blocks exact to meet it; none: no such decision (default: %(default)s)",
        "--sla-topk SHARE": "share of the key blocks that sparse self-attention sees, in a Wan "
        "checkpoint with SLA's proj_l; other checkpoints run dense (default: %(default)s)",
    }
    default = PatchConfig()
    group = command.add_argument_group("patch")
    add_options(group, options, **asdict(default), pair_form=default.form)


def _examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  python -m turbo_rcm_patch {line}" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
