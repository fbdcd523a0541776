"""The command line: arguments only. `python -m turbo_rcm_patch --help` lists what it does."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from turbo_rcm_patch.config import (
    Attention,
    Form,
    Impl,
    Linear,
    PatchConfig,
    Precision,
    PVDType,
    ResidualDType,
)
from turbo_rcm_patch.exit_codes import CHANGED, OK, TABLE, USAGE, run_command

__all__ = ["main"]

#: What `pip install .` brings, whose absence deserves a line and not a traceback.
NEEDED = ("torch", "triton", "diffusers", "safetensors")


#: What the shipped models understand, for the examples of `--help`.
_PROMPT: Final = "a large red circle moving left on a black background"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        0 on success (for `compare` and `demo`: "unchanged"), 4 for "similar", 1 for another
        verdict, 2 for a mistake in the arguments, the model or the files, 3 for an unexpected
        error, 130 if interrupted; see `exit_codes`.
    """
    parser = _parser()
    given = sys.argv[1:] if argv is None else list(argv)
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

    return run_command(run, interrupted="Interrupted. The model is as it was.")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.run == "demo":
        from turbo_rcm_patch.demo import demo

        return demo(
            arguments.out,
            model=arguments.model,
            fresh=not arguments.resume,
            command=arguments.command_line,
        )
    if arguments.run == "bench":
        from turbo_rcm_patch.bench import bench

        return bench(device=arguments.device, calls=arguments.calls, micro=arguments.micro)
    if arguments.run == "tune":
        from turbo_rcm_patch.tune import tune

        return tune(
            device=arguments.device,
            only=[name.strip() for name in arguments.only.split(",") if name.strip()],
            out=arguments.out,
            quick=arguments.quick,
            micro=arguments.micro,
            calls=arguments.calls,
            limit=arguments.limit,
            dry_run=arguments.dry_run,
        )
    if arguments.run == "doctor":  # It has to run where packages are missing.
        from turbo_rcm_patch.sampling.doctor import examine

        report = examine()
        print(report)
        return OK if report.healthy else CHANGED
    from turbo_rcm_patch.sampling import commands

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
    _add_generate(commands)
    _add_compare(commands)
    _add_pairs(commands)
    _add_convert(commands)
    doctor = commands.add_parser(
        "doctor",
        help="check the installation and the GPU",
        description="Print what is installed, what the GPU can run and which kernels would run, "
        "and say how to fix what is wrong. Exit code 1 if something that is needed is missing.",
    )
    doctor.set_defaults(run="doctor")
    support = commands.add_parser(
        "support",
        help="list the supported models and features",
        description="Print the supported classes, the skip pairs of their published models, and "
        "the features that tests prove for each class.",
    )
    support.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="replace the generated part of FILE with the list",
    )
    support.set_defaults(run="support")
    demo = commands.add_parser(
        "demo",
        help="compare a shipped model with its patched self; no GPU is needed",
        description="Generate 10 prompts with a shipped model: unpatched, patched, and unpatched "
        "with another exact attention. Judge the videos, then run one block of the model through "
        "the Triton kernels. Exit code 0 only if nothing visible changed and the kernels are "
        "right, 4 if the videos are only similar, else 1, 2 for a mistake, 3 for an unexpected "
        "error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples(
            "demo --out outputs/demo", "demo --model tiny-cogvideox --out outputs/cogvideox"
        ),
    )
    demo.add_argument(
        "--model",
        metavar="NAME",
        help="'tiny' (the shipped Wan, default), 'tiny-cogvideox', or a folder with such a model",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/demo"),
        metavar="DIR",
        help="folder for the report; files that an earlier demo or compare wrote there are "
        "removed, others are kept (default: %(default)s)",
    )
    demo.add_argument("--resume", action="store_true", help="continue an interrupted demo")
    demo.set_defaults(run="demo")
    _add_bench_and_tune(commands)
    return parser


def _add_bench_and_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="check the attention on this card and time it",
        description="Check our attention against exact attention in fp64 at a few sizes, time it "
        "beside torch's, and print one line to paste into an issue. Exit code 1 if an output is "
        "wrong.",
    )
    bench.add_argument("--calls", type=int, default=50, metavar="N", help="most timed calls")
    bench.set_defaults(run="bench")
    tune = commands.add_parser(
        "tune",
        help="measure tile shapes on this card and keep the best for later runs",
        description="Measure the tile shapes of each kernel on the present card and write a table "
        "that the kernels read instead of the shipped one. Then measure from which length on int8 "
        'is faster than exact attention, which is what attention="auto" reads.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples(
            "tune --dry-run",
            "tune --only attention.fp8_128,project",
            "tune --only auto            (the lengths alone, some ten seconds)",
            "tune --out my-tiles.json    (read with TURBO_RCM_PATCH_TILES=my-tiles.json)",
        ),
    )
    tune.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON to write (default: the user's own table)"
    )
    tune.add_argument(
        "--only",
        default="",
        metavar="KERNEL[.VARIANT],...",
        help="what to tune, * for any (default: all of 64 and 128 channels a head)",
    )
    tune.add_argument("--quick", action="store_true", help="fewer calls and smaller inputs")
    tune.add_argument("--calls", type=int, metavar="N", help="most timed calls of a candidate")
    tune.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="begin no measurement after this, and say what was left out (default: %(default)s)",
    )
    tune.add_argument("--dry-run", action="store_true", help="show what would be written")
    tune.set_defaults(run="tune")
    for one in (bench, tune):
        one.add_argument(
            "--device", default="cuda", help='"cuda", "cuda:1", or "cpu" with --micro'
        )
        one.add_argument(
            "--micro", action="store_true", help="toy sizes, to try the command itself"
        )


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        help="generate videos with the patched model",
        description="Generate one mp4 for each prompt with the patched model. Under torchrun "
        "every process takes its share of the prompts, on the GPU of its number; with --ulysses "
        "or --ring every group of processes, which split each video. If one of several prompts "
        "fails, the others are still written, and the exit code is 2.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples(
            f"generate --prompt '{_PROMPT}' --out circle.mp4",
            "generate --model PATH --sampler scheduler --steps 50 --guidance-scale 5 \\\n"
            "    --offload model --prompt 'a cat on a skateboard' --out outputs/cat",
            "generate --model PATH --prompts prompts.txt --out outputs/many --resume",
        )
        + "\n  torchrun --nproc-per-node 8 -m turbo_rcm_patch generate \\\n"
        "      --model PATH --prompts prompts.txt --out outputs/many --resume",
    )
    _add_model(generate)
    _add_sampling(generate)
    generate.add_argument(
        "--out",
        default="outputs/generate",
        metavar="PATH",
        help="an .mp4 file, or a folder (default: %(default)s)",
    )
    generate.add_argument(
        "--resume",
        action="store_true",
        help="keep videos that are there and were made by the same command, from the same prompt "
        "and seed. What a video was made from is written beside it, in a .json",
    )
    generate.add_argument("--no-patch", action="store_true", help="do not patch the model")
    _add_patch(generate)
    generate.set_defaults(run="generate")


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare the videos before and after patching, and give a verdict",
        description="Generate every prompt three times from the same noise: unpatched, patched, "
        "and unpatched with another exact attention backend. Judge whether anything visible "
        "changed. Writes videos, plots, metrics.json, report.html and report.md. If it was "
        "interrupted, the same command continues. Under torchrun the processes share the "
        "sampling, the first writes, and all exit with the verdict. Exit code 0: unchanged, "
        "4: similar, 1: changed or undecided, 2: a mistake in the arguments, the model or the "
        "files, 3: an unexpected error, 130: interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples(
            f"compare --prompt '{_PROMPT}' --out outputs/circle",
            f"compare --prompt '{_PROMPT}' --attention int4   # shows what fails",
            "compare --model PATH --sampler scheduler --steps 30 --offload model \\\n"
            "    --prompts prompts.txt --out outputs/wan",
        )
        + "\n  torchrun --nproc-per-node 2 -m turbo_rcm_patch compare --ulysses 2 \\\n"
        "      --model PATH --prompts prompts.txt --out outputs/wan",
    )
    _add_model(compare)
    _add_sampling(compare)
    compare.add_argument(
        "--out",
        default="outputs/compare",
        metavar="DIR",
        help="folder for everything (default: %(default)s)",
    )
    compare.add_argument(
        "--fresh",
        action="store_true",
        help="start again: remove what an earlier compare wrote into DIR, and keep other files",
    )
    compare.add_argument(
        "--network-number",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="measure the error of one network call against fp32, block by block. By default it "
        'is measured unless the transformer is offloaded; then the verdict is "undecided". '
        "--no-network-number gives a verdict without this number",
    )
    _add_patch(compare)
    compare.set_defaults(run="compare")


def _add_pairs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pairs = commands.add_parser(
        "pairs",
        help="list the skip pairs of a model and how each would run",
        description="List every skip pair of a model and how it would run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples("pairs --model tiny", "pairs --model PATH"),
    )
    pairs.add_argument(
        "--model",
        default="tiny",
        metavar="PATH_OR_ID",
        help="a Wan or CogVideoX pipeline folder, a hub id, 'tiny' or 'tiny-cogvideox'",
    )
    pairs.set_defaults(run="pairs")


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a TurboDiffusion .pth to a diffusers folder, and back",
        description="Write a TurboDiffusion checkpoint (plain or -quant, with or without SLA) as "
        "a transformer folder of diffusers, or with --base as a whole pipeline with the rCM "
        "scheduler. Stock classes have no place for proj_l and int8 weights; these are written to "
        "turbo_extra.safetensors beside the weights. Nothing in a checkpoint is executed. If the "
        "conversion fails, nothing is left behind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_examples(
            "convert TurboWan2.1-T2V-1.3B-480P.pth turbowan/transformer",
            "convert TurboWan2.1-T2V-1.3B-480P-quant.pth turbowan \\\n"
            "    --base Wan2.1-T2V-1.3B-Diffusers",
            "convert TurboWan2.2-I2V-A14B-high-720P.pth turbowan22 \\\n"
            "    --low-noise TurboWan2.2-I2V-A14B-low-720P.pth --base Wan2.2-I2V-A14B-Diffusers",
            "convert --back turbowan back.pth",
        ),
    )
    convert.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a .pth file or a folder of torch.distributed.checkpoint; with --back a folder",
    )
    convert.add_argument(
        "out", type=Path, metavar="OUT", help="folder to write; with --back the .pth file"
    )
    convert.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="diffusers pipeline folder of the same model; makes OUT a whole pipeline",
    )
    convert.add_argument(
        "--low-noise",
        type=Path,
        metavar="PTH",
        help="the second expert of Wan 2.2 A14B; SOURCE is then the high-noise one",
    )
    convert.add_argument(
        "--copy",
        action="store_true",
        help="copy the base's VAE and text encoder instead of linking to them",
    )
    convert.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of weights that diffusers does not keep in fp32 (default: the checkpoint's)",
    )
    convert.add_argument(
        "--heads",
        type=int,
        metavar="N",
        help="number of attention heads, if a head does not have 128 channels",
    )
    convert.add_argument(
        "--network",
        metavar="NAME",
        help="which network to take from a file with several, e.g. net_ema (default: the one that "
        "is not an average)",
    )
    convert.add_argument(
        "--int8-only",
        action="store_true",
        help="write the int8 weights of a -quant checkpoint alone: OUT is about as large as "
        "SOURCE; this package loads it, and stock classes refuse it",
    )
    convert.add_argument("--back", action="store_true", help="convert a folder back to a .pth")
    convert.add_argument("--force", action="store_true", help="replace an existing OUT")
    convert.set_defaults(run="convert")


def _add_model(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("model")
    group.add_argument(
        "--model",
        default="tiny",
        metavar="PATH_OR_ID",
        help="a Wan or CogVideoX pipeline folder, a hub id, or one of the shipped models 'tiny' "
        "and 'tiny-cogvideox' (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="dtype of transformer and text encoder; the VAE has float32 (default: %(default)s)",
    )
    group.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one)"
    )
    group.add_argument(
        "--offload",
        choices=("none", "model", "group", "sequential"),
        default="none",
        help="keep only one component (model), one block of a transformer and one layer of the "
        "rest (group), or one layer (sequential) on the GPU at a time",
    )


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "sampling", "Defaults come from turbo_rcm.json in the model's folder, if there is one."
    )
    group.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="prompt; may be repeated",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file with one prompt per line. After a tab a line may name an image or a video of "
        "its own, relative to the file",
    )
    for name, text in (
        ("ulysses", "under torchrun: so many GPUs share a video and exchange attention heads"),
        ("ring", "under torchrun: so many GPUs, or groups of --ulysses, pass keys on"),
    ):
        group.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    for name, text in (
        ("image", "first frame of every video, for an image-to-video model"),
        ("last-image", "last frame of every video, for a model that was trained with one"),
        ("video", "video to begin with, for a video-to-video pipeline; for VACE its control"),
        ("mask", "for VACE: a video or an image, white where --video is made anew"),
    ):
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    group.add_argument(
        "--reference",
        type=Path,
        action="append",
        metavar="FILE",
        help="for VACE: image of what the video shows; may be repeated",
    )
    group.add_argument(
        "--strength",
        type=float,
        metavar="S",
        help="how much of --video is made anew: this share of the steps runs (default: 0.8)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the first prompt; the next one uses N + 1 (default: 0)",
    )
    group.add_argument(
        "--sampler",
        choices=("rcm", "scheduler"),
        help="rcm: 1 to 4 steps of a distilled model; scheduler: the pipeline's own scheduler "
        "(default: rcm; CogVideoX has only scheduler)",
    )
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="denoising steps (default: 4 for rcm, 50 for scheduler)",
    )
    group.add_argument(
        "--form", choices=("sde", "ode"), help="form of the rCM sampler (default: sde)"
    )
    group.add_argument(
        "--sigma-max",
        type=float,
        metavar="S",
        help="largest noise level of the rCM sampler (default: 80; 200 for Wan 2.2 I2V)",
    )
    for name, text in (
        ("height", "height in pixels"),
        ("width", "width in pixels"),
        ("num-frames", "number of frames"),
        ("fps", "frames per second of the mp4"),
        ("max-sequence-length", "largest number of prompt tokens"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument(
        "--guidance-scale", type=float, metavar="S", help="for --sampler scheduler (default: 5)"
    )
    group.add_argument(
        "--guidance-scale-2",
        type=float,
        metavar="S",
        help="guidance scale of Wan 2.2's low-noise expert",
    )
    group.add_argument("--negative-prompt", metavar="TEXT", help="what the video should not show")


def _add_patch(command: argparse.ArgumentParser) -> None:
    default = PatchConfig()
    group = command.add_argument_group("patch")
    for name, choices, text in (
        ("attention", get_args(Attention), "how attention runs"),
        ("pv", get_args(PVDType), "element type of probabilities and values"),
        ("linear", get_args(Linear), "how the Linears of fused pairs run"),
        ("precision", get_args(Precision), "auto: the guard may make an attention more precise"),
        ("impl", get_args(Impl), "Triton kernels or plain torch"),
        ("form", get_args(Form), "attention and projection in one launch or two"),
        ("residual", get_args(ResidualDType), "dtype of the residual stream inside a block"),
    ):
        flag = "--pair-form" if name == "form" else f"--{name}"
        group.add_argument(
            flag,
            choices=choices,
            default=getattr(default, name),
            help=f"{text} (default: %(default)s)",
        )
    group.add_argument(
        "--no-guard",
        action="store_true",
        help="do not compare pairs with their author's code while running",
    )
    group.add_argument(
        "--guard-budget",
        type=float,
        default=default.guard_budget,
        metavar="E",
        help="largest error the guard accepts, as a share of what a pair adds to its residual "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--fidelity",
        type=float,
        default=default.fidelity,
        metavar="R",
        help="with --precision auto: target for the network's error, in units of the unpatched "
        "network's (default: %(default)s)",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="run pairs as the guard chose before, from a file of report.save_calibration",
    )
    group.add_argument(
        "--sla-topk",
        type=float,
        default=default.sla_topk,
        metavar="SHARE",
        help="share of the key blocks that sparse self-attention sees, in a Wan checkpoint with "
        "SLA's proj_l; other checkpoints run dense (default: %(default)s)",
    )


def _examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  python -m turbo_rcm_patch {line}" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
