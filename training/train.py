"""Train a tiny model from nothing: `python -m training train --out DIR`.

Four stages, each with its own budget in minutes (or in steps, which is repeatable): the VAE, a
flow-matching teacher with its text encoder, the few-step student that ships, and once more the
VAE's decoder. The default budgets are 20.5 minutes of training on an H200 in all. DIR receives
log.jsonl, curves.png, sheets/*.png and the pipeline folders wan_teacher and wan_student.

`--family cogvideox` trains the tiny CogVideoX instead, in a DIR of its own, on the latents of the
tiny Wan: its VAE learns them from Wan's (and needs no fourth stage), then teacher and student as
above, in 12.3 minutes in all. DIR receives cogvideox_teacher and cogvideox_student. Its defaults
are those of the run that made what ships (`RECIPE` in `training/family_cogvideox.py`).

In pieces: state is written to DIR/state every minute, in files of at most 16 MiB, and the same
command with `--resume` continues where the last one stopped. Where the state cannot be kept, a
pipeline folder is enough: `--start DIR/wan_teacher` takes its VAE as it is and starts the teacher
from its weights; `--stage decoder --start DIR/wan_student` trains only that folder's decoder and
writes it again (`--stage vae --start DIR/cogvideox_student` the whole VAE). `--stage install`
copies DIR/wan_student, or that of the family, to where the package looks for it.
With `--limit MINUTES` the run ends by itself, wherever it is, and leaves folders that can be used.

While it runs, DIR/control.json ({"teacher": {"minutes": 9, "lr": 0.0005}, ...}) is read every few
steps and changes budget or peak learning rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from training.build import TinyConfig, trained_folder
from training.family import FAMILIES, Family, family_of, family_of_folder
from training.probe import Flow, export
from training.run import Budget, Run
from training.train_flow import build_corpus, train_student, train_teacher
from training.train_vae import channels_last, train_decoder, train_twin, train_vae
from training.usage import add_options
from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.output import merged, write_json
from turbo_rcm_patch.tiny import TINY_WAN

_STAGES: Final = ("vae", "teacher", "student", "decoder", "install", "all")
_MOST_BYTES: Final = 16 * 2**20


def _arguments(family: Family) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training train",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"Defaults are those of --family {family.NAME}.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for state, logs, sheets and pipeline folders",
    )
    shown = "(default: %(default)s)"
    options = {
        f"--family {{{','.join(FAMILIES)}}}": f"which tiny model to train {shown}",
        f"--stage {{{','.join(_STAGES)}}}": "vae, teacher and student train up to that stage, "
        "decoder the decoder of --start alone, install copies the student to where the package "
        f"looks for it {shown}",
        "--limit MINUTES": "stop after so many minutes, with what there is",
        "--start FOLDER": "pipeline folder: take its VAE as it is, and start the teacher from it",
        "--resume": "continue a folder that has state already",
        "--seed N": f"seed of weights, clips and noise {shown}",
        "--device DEVICE": "cpu, cuda or cuda:N (default: a GPU if there is one)",
        "--precision {bf16,fp32}": "autocast (default: bf16 on a GPU, fp32 on a CPU)",
        "--cudnn-benchmark": "let cuDNN try out algorithms (slow to start)",
        "--micro": "a network for smoke tests",
        "--clips N": f"clips to encode for teacher and student {shown}",
        "--corpus-seconds S": f"encode no clips after this {shown}",
        "--guidance S": f"classifier-free guidance of the teacher, for t > 0.6 {shown}",
        "--fill N": f"batches of the teacher before the student's first step {shown}",
        "--refresh N": f"steps of the student for each new batch of the teacher {shown}",
        "--probe-count N": f"videos that a probe generates and judges {shown}",
    }
    defaults: dict[str, Any] = {
        "family": "wan", "stage": "all", "seed": 0, "clips": 49152, "corpus_seconds": 75.0,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "guidance": 1.5, "fill": 48, "refresh": 6, "probe_count": 128,
    }  # fmt: skip
    for stage, what, batch, lr in (
        ("vae", "whole pictures", 16, 1e-3),
        ("teacher", "clips", 128, 1e-3),
        ("student", "samples", 128, 5e-4),
        ("decoder", "whole pictures", 16, 6e-4),
    ):
        if stage in family.MINUTES:
            options |= {
                f"--minutes-{stage} MINUTES": f"how long the {stage} trains {shown}",
                f"--steps-{stage} N": "the same in steps, which is repeatable",
                f"--batch-{stage} N": f"{what} in a step {shown}",
                f"--lr-{stage} R": f"peak learning rate {shown}",
            }
            minutes = family.MINUTES[stage]
            defaults |= {f"minutes_{stage}": minutes, f"batch_{stage}": batch, f"lr_{stage}": lr}
    add_options(parser, options, **{**defaults, **family.RECIPE})
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile the transformer blocks (default: on a GPU)",
    )
    return parser


def polish_folder(run: Run, family: Family, config: Any, args: argparse.Namespace) -> None:
    """Write the pipeline folder `--start` again, with a better VAE, under its own name.

    Of Wan's only the decoder is trained: what the transformer has learnt is its encoder's. The
    tiny CogVideoX's latents are Wan's, so that all of its VAE can go on learning.
    """
    if args.stage == "decoder":
        vae = train_decoder(
            run, config, _load_vae(family, args.start, run.device), _budget(args, "decoder")
        )
    else:
        original = _load_vae(family_of("wan"), TINY_WAN, run.device)
        vae = train_twin(run, config, original, _budget(args, "vae"), start=args.start)
    pipe = family.PIPELINE.from_pretrained(args.start, dtype=torch.float32)
    export(run.out / args.start.name, family, config, vae, pipe.text_encoder, pipe.transformer)
    run.log(event="finished")


def install(student: Path, target: Path = TINY_WAN) -> Path:
    """Put a trained pipeline folder where the package looks for it; the model card stays.

    Raises:
        ModelFolderError: There is no such folder, or with the card it exceeds 16 MiB.
    """
    files = [path for path in trained_folder(student).rglob("*") if path.is_file()]
    kept = [path for path in target.glob("*.md") if not (student / path.name).exists()]
    size = sum(path.stat().st_size for path in files + kept)
    if size > _MOST_BYTES:
        raise ModelFolderError(
            "size of the model", expected=f"at most {_MOST_BYTES} bytes", got=str(size)
        )
    with merged(target) as made:
        shutil.copytree(student, made, dirs_exist_ok=True)
    return target


def _budget(args: argparse.Namespace, stage: str) -> Budget:
    """Return the budget of a stage."""
    return Budget(*(getattr(args, f"{field.name}_{stage}") for field in fields(Budget)))


def _load_vae(family: Family, folder: Path, device: torch.device) -> Any:
    """A finished VAE, frozen, in fp32."""
    vae = family.VAE.from_pretrained(folder, subfolder="vae", dtype=torch.float32).to(device)
    vae.eval().requires_grad_(False)
    channels_last(vae)
    return vae


def _autoencoders(
    run: Run, family: Family, config: Any, args: argparse.Namespace
) -> tuple[AutoencoderKLWan, Any]:
    """The VAE that encodes the corpus, and the one that ships; for Wan they are one."""
    vae = None if args.start is None else _load_vae(family, args.start, run.device)
    if family.NAME == "wan":
        vae = vae or train_vae(run, config, _budget(args, "vae"))
        return vae, vae
    original = _load_vae(family_of("wan"), TINY_WAN, run.device)
    return original, vae or train_twin(run, config, original, _budget(args, "vae"))


def _flow(
    run: Run, family: Family, config: TinyConfig, vaes: tuple[Any, Any], args: argparse.Namespace
) -> tuple[nn.Module, nn.Module, nn.Module] | None:
    """Text encoder, teacher and student; None if the student was not asked for, or came too late
    to be one.
    """
    encoding, vae = vaes
    clips = cache(
        lambda: build_corpus(run, config, encoding, count=args.clips, seconds=args.corpus_seconds)
    )
    flow = Flow(run, family, config, vae, args.guidance, args.compile, args.probe_count)
    teacher, encoder = train_teacher(flow, clips, _budget(args, "teacher"), args.start)
    if args.stage == "teacher" or run.late:
        return None
    student = train_student(
        flow, clips, teacher, encoder, _budget(args, "student"),
        fill=args.fill, refresh=args.refresh,
    )  # fmt: skip
    return encoder, teacher, student


def _earlier_run(out: Path) -> dict[str, str] | None:
    """Return the arguments of the earlier run in a folder.

    They are empty if there was none, and None if its config.json is of another origin.
    """
    path = out / "config.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_run = isinstance(found, dict) and found.keys() >= {"family", "stage", "out"}
    return found if is_run else None


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, family: Family) -> None:
    """End with a message for arguments that do not fit together, or not to the folders they name.

    Raises:
        ModelFolderError: `--start` is no folder of a training.
    """
    if args.stage == "decoder" and args.start is None:
        parser.error(
            "--stage decoder needs --start FOLDER, the pipeline whose decoder is to be trained on"
        )
    if args.stage not in {*family.MINUTES, "all"}:
        parser.error(f"--family {family.NAME} has no stage {args.stage!r}")
    if args.stage == "vae" and args.start is not None and "decoder" in family.MINUTES:
        parser.error("the VAE of --start is finished; --stage decoder trains its decoder on")
    if args.start is not None:
        found = family_of_folder(trained_folder(args.start)).NAME
        if found != family.NAME:
            parser.error(f"--start {args.start} is of --family {found}, not {family.NAME}")
    counts = [name for name in vars(args) if name.startswith(("batch_", "steps_"))]
    for name in ("clips", "refresh", "probe_count", *counts):
        count = getattr(args, name)
        if count is not None and count < 1:
            parser.error(f"--{name.replace('_', '-')} is a number from 1 on")
    earlier = _earlier_run(args.out)
    if earlier is None:
        parser.error(f"{args.out}/config.json is not that of a training run: pass another --out")
    if not (args.out / "state").exists():
        return
    # The state has weights of these sizes, and random numbers of this seed.
    other = {
        name: earlier[name]
        for name in ("family", "micro", "seed")
        if earlier.get(name, str(getattr(args, name))) != str(getattr(args, name))
    }
    if other:
        given = ", ".join(f"{name} {value}" for name, value in other.items())
        parser.error(
            f"{args.out} has state of a run with {given}: pass the same, or another --out"
        )
    if not args.resume:
        parser.error(f"{args.out} has state of an earlier run: pass --resume, or another --out")


def _prepare(args: argparse.Namespace) -> Run:
    """Settle what depends on the device, and open the run's folder."""
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    if args.compile is None:
        args.compile = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    run = Run(args.out, device, args.seed, autocast=precision == "bf16")
    if args.limit is not None:
        run.limit = 60 * args.limit
    given = {name: str(value) for name, value in vars(args).items()}
    run.log(event="start", torch=torch.__version__, **given)
    write_json(run.out / "config.json", given, indent=2)
    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages that were asked for, after loading those before them."""
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--family", default="wan")
    name = named.parse_known_args(arguments)[0].family
    family = family_of(name if name in FAMILIES else "wan")  # The other parser refuses the name.
    parser = _arguments(family)
    args = parser.parse_args(arguments)
    if args.stage == "install":
        print(f"installed {install(args.out / f'{family.NAME}_student', family.SHIPPED)}")
        return
    _check(parser, args, family)
    run = _prepare(args)
    config = family.config().small() if args.micro else family.config()
    if args.start is not None and args.stage in ("decoder", "vae"):
        polish_folder(run, family, config, args)
        return
    vaes = _autoencoders(run, family, config, args)
    if args.stage == "vae":
        return
    found = _flow(run, family, config, vaes, args)
    if found is None or args.stage == "student":
        return
    encoder, teacher, student = found
    vae = vaes[1]
    if "decoder" in family.MINUTES:
        vae = train_decoder(run, config, vae, _budget(args, "decoder"))
    for name, network in (("teacher", teacher), ("student", student)):
        export(run.out / f"{family.NAME}_{name}", family, config, vae, encoder, network)
    run.log(event="finished")
