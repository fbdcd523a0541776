"""Train the tiny Wan from nothing: `python -m turbo_rcm_patch.tiny.train --out DIR`.

Four stages, each with its own budget in minutes (or in steps, which is repeatable): the VAE, a
flow-matching teacher with its text encoder, the few-step student that ships, and once more the
VAE's decoder. The default budgets are 20.5 minutes of training on an H200 in all. DIR receives
log.jsonl, curves.png, sheets/*.png and the pipeline folders wan_teacher and wan_student.

In pieces: state is written to DIR/state every minute, in files of at most 16 MiB, and the same
command with `--resume` continues where the last one stopped. Where the state cannot be kept, a
pipeline folder is enough: `--start DIR/wan_teacher` takes its VAE as it is and starts the teacher
from its weights; `--stage decoder --start DIR/wan_student` trains only that folder's decoder and
writes it again. `--stage install` copies DIR/wan_student to where the package looks for it.

While it runs, DIR/control.json ({"teacher": {"minutes": 9, "lr": 0.0005}, ...}) is read every few
steps and changes budget or peak learning rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Final

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from turbo_rcm_patch.errors import ModelFolderError
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.tiny.build import SETTINGS_FILE, TinyConfig
from turbo_rcm_patch.tiny.probe import export
from turbo_rcm_patch.tiny.run import Run
from turbo_rcm_patch.tiny.train_decoder import train_decoder
from turbo_rcm_patch.tiny.train_flow import build_corpus, train_student, train_teacher
from turbo_rcm_patch.tiny.train_vae import train_vae, use_layout

__all__ = ["install", "main"]

_STAGES: Final = ("vae", "teacher", "student", "decoder", "install", "all")
_MOST_BYTES: Final = 16 * 2**20


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        help="folder for state, logs, sheets and pipeline folders",
    )
    add("--stage", choices=_STAGES, default="all")
    add(
        "--start",
        type=Path,
        help="pipeline folder: take its VAE as it is, and start the teacher from it",
    )
    add("--resume", action="store_true", help="continue a folder that has state already")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--precision",
        choices=("bf16", "fp32"),
        help="autocast; default bf16 on a GPU, fp32 on a CPU",
    )
    add(
        "--cudnn-benchmark",
        action="store_true",
        help="let cuDNN try out algorithms (slow to start)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile the transformer blocks; default on a GPU",
    )
    add("--micro", action="store_true", help="a network for smoke tests")
    for stage, minutes, batch, lr in (
        ("vae", 5.0, 16, 1e-3),
        ("teacher", 7.0, 128, 1e-3),
        ("student", 4.5, 128, 5e-4),
        ("decoder", 4.0, 16, 6e-4),
    ):
        add(f"--minutes-{stage}", type=float, default=minutes)
        add(f"--steps-{stage}", type=int, help="budget in steps instead of minutes")
        add(f"--batch-{stage}", type=int, default=batch)
        add(f"--lr-{stage}", type=float, default=lr)
    add("--clips", type=int, default=49152, help="encoded training clips")
    add("--corpus-seconds", type=float, default=75.0, help="stop encoding after this long")
    add("--guidance", type=float, default=1.5, help="of the teacher, t > 0.6 only")
    add("--fill", type=int, default=48, help="teacher batches before the student's first step")
    add("--refresh", type=int, default=6, help="student steps per new teacher batch")
    add("--probe-count", type=int, default=128, help="videos per probe")
    return parser


def polish_folder(
    run: Run, config: TinyConfig, vae: AutoencoderKLWan, args: argparse.Namespace
) -> None:
    """Write the pipeline folder `--start` again, with a better decoder, under its own name."""
    vae = train_decoder(
        run,
        config,
        vae,
        minutes=args.minutes_decoder,
        steps=args.steps_decoder,
        batch=args.batch_decoder,
        lr=args.lr_decoder,
    )
    pipe = WanPipeline.from_pretrained(args.start, dtype=torch.float32)
    export(run.out / args.start.name, config, vae, pipe.text_encoder, pipe.transformer)
    run.log(event="finished")


def install(student: Path, target: Path = TINY_WAN) -> Path:
    """Put a trained pipeline folder where the package looks for it; the model card stays.

    Raises:
        ModelFolderError: There is no such folder, or with the card it exceeds 16 MiB.
    """
    if not (student / SETTINGS_FILE).exists():
        raise ModelFolderError(
            "model",
            expected=f"a folder with {SETTINGS_FILE}",
            got=str(student),
            remedy="Train it first",
        )
    files = [path for path in student.rglob("*") if path.is_file()]
    kept = [path for path in target.glob("*.md") if not (student / path.name).exists()]
    size = sum(path.stat().st_size for path in files + kept)
    if size > _MOST_BYTES:
        raise ModelFolderError(
            "size of the model", expected=f"at most {_MOST_BYTES} bytes", got=str(size)
        )
    shutil.copytree(student, target, dirs_exist_ok=True)
    return target


def main(arguments: list[str] | None = None) -> None:
    """Run the stages that were asked for, after loading those before them."""
    parser = _arguments()
    args = parser.parse_args(arguments)
    if args.stage == "install":
        print(f"installed {install(args.out / 'wan_student')}")
        return
    if args.stage == "decoder" and args.start is None:
        parser.error(
            "--stage decoder needs --start FOLDER, the pipeline whose decoder is to be trained on"
        )
    if (args.out / "state").exists() and not args.resume:
        parser.error(f"{args.out} has state of an earlier run: pass --resume, or another --out")
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    if args.compile is None:
        args.compile = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    precision = args.precision or ("bf16" if device.type == "cuda" else "fp32")
    run = Run(args.out, device, args.seed, autocast=precision == "bf16")
    config = TinyConfig.micro() if args.micro else TinyConfig()
    run.log(event="start", torch=torch.__version__, **{k: str(v) for k, v in vars(args).items()})
    (run.out / "config.json").write_text(
        json.dumps({k: str(v) for k, v in vars(args).items()}, indent=2)
    )

    if args.start is None:
        vae = train_vae(
            run,
            config,
            minutes=args.minutes_vae,
            steps=args.steps_vae,
            batch=args.batch_vae,
            lr=args.lr_vae,
        )
    else:
        vae = AutoencoderKLWan.from_pretrained(
            args.start, subfolder="vae", dtype=torch.float32
        ).to(device)
        vae.eval().requires_grad_(False)
        use_layout(vae, "channels-last")
    if args.stage == "decoder":
        polish_folder(run, config, vae, args)
        return
    if args.stage == "vae":
        return
    corpus = build_corpus(run, config, vae, count=args.clips, seconds=args.corpus_seconds)
    teacher, encoder = train_teacher(
        run,
        config,
        vae,
        corpus,
        minutes=args.minutes_teacher,
        steps=args.steps_teacher,
        batch=args.batch_teacher,
        lr=args.lr_teacher,
        guidance=args.guidance,
        compiled=args.compile,
        probe_count=args.probe_count,
        start=args.start,
    )
    if args.stage == "teacher":
        return
    student = train_student(
        run,
        config,
        vae,
        corpus,
        teacher,
        encoder,
        minutes=args.minutes_student,
        steps=args.steps_student,
        batch=args.batch_student,
        lr=args.lr_student,
        guidance=args.guidance,
        fill=args.fill,
        refresh=args.refresh,
        compiled=args.compile,
        probe_count=args.probe_count,
    )
    if args.stage == "student":
        return
    vae = train_decoder(
        run,
        config,
        vae,
        minutes=args.minutes_decoder,
        steps=args.steps_decoder,
        batch=args.batch_decoder,
        lr=args.lr_decoder,
    )
    export(run.out / "wan_teacher", config, vae, encoder, teacher)
    export(run.out / "wan_student", config, vae, encoder, student)
    run.log(event="finished")


if __name__ == "__main__":
    main()
