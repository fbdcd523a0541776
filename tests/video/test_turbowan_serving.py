"""--serve: TurboDiffusion's commands, lines that go on, an image for every prompt."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.video.test_turbowan_arguments import LEAST
from tests.video.turbowan import (
    EXACT,
    PROMPT,
    SMALL,
    expert_pths,
    image_base,
    main_of,
    picture,
    text_pth,
)
from turbo_rcm_patch.errors import ConfigError
from turbowan import sampling
from turbowan.arguments import image_to_video_parser, parse, text_to_video_parser
from turbowan.serving import serve

__all__ = ["expert_pths", "image_base", "picture", "text_pth"]

T2V = LEAST["wan2.1_t2v_infer.py"][:2]
I2V = LEAST["wan2.2_i2v_infer.py"][:4]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def served(
    lines: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
    image: bool = False,
    terminal: bool = False,
) -> tuple[list[tuple[Any, ...]], Any]:
    """What is generated, with the settings it is generated with."""
    monkeypatch.setattr(sys, "stdin", (Terminal if terminal else io.StringIO)(lines))
    parser = image_to_video_parser("") if image else text_to_video_parser("")
    least = [*(I2V if image else T2V), "--serve", "--save_path", str(tmp_path / "video.mp4")]
    arguments = parse(parser, [*least, *more])
    done: list[tuple[Any, ...]] = []

    def generate(prompt: str, path: Path) -> None:
        settings = (arguments.num_steps, arguments.num_frames, arguments.sigma_max)
        done.append((prompt, path.name, settings, getattr(arguments, "image_path", None)))

    assert serve(arguments, generate) == 0
    return done, arguments


def test_lines_that_end_in_a_backslash_go_on(tmp_path, monkeypatch, capsys) -> None:
    done, _ = served("a cat \\\nwatching rain\n\\\n a dog\nthe end\\", tmp_path, monkeypatch)
    assert [prompt for prompt, *_ in done] == ["a cat \nwatching rain", "a dog", "the end"]
    assert "... " in capsys.readouterr().err


def test_settings_change_between_prompts(tmp_path, monkeypatch, capsys) -> None:
    lines = "one\n/set num_steps 2\n/SET num_frames 5\n/set sigma_max 120\ntwo\n/show\n/reset\n"
    done, _ = served(lines + "three\n/quit\nfour\n", tmp_path, monkeypatch)
    assert [one[2] for one in done] == [(4, 81, 80.0), (2, 5, 120.0), (4, 81, 80.0)]
    told = capsys.readouterr().err
    assert "num_steps = 2" in told and "  num_steps: 2 *" in told and "  seed: 0\n" in told
    assert "dit_path: x.pth" in told


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("/set num_steps 5", "steps"), ("/set num_steps two", "a whole number"),
        ("/set num_frames 0", "--num_frames; expected at least 1"), ("/set sigma_max -1", "sigma"),
        ("/set sigma_max nan", "sigma"), ("/set num_steps", "a name and a value"),
        ("/set dit_path y.pth", "cannot be set while the model is loaded"),
        ("/sett num_steps 2", "There is no command /sett; /help"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_said_and_changes_nothing(
    command, told, tmp_path, monkeypatch, capsys
) -> None:
    done, arguments = served(f"{command}\na cat\n", tmp_path, monkeypatch)
    assert told in capsys.readouterr().err
    assert [one[:3] for one in done] == [("a cat", "video-001.mp4", (4, 81, 80.0))]
    assert arguments.dit_path == "x.pth"


def test_help_lists_the_commands(tmp_path, monkeypatch, capsys) -> None:
    assert served("/help\n", tmp_path, monkeypatch)[0] == []
    told = capsys.readouterr().err
    for word in ("/help", "/show", "/set", "/reset", "/quit", "num_steps", "num_samples"):
        assert word in told


def test_every_prompt_has_an_image(tmp_path, monkeypatch, capsys) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    lines = f"nothing\n\none\n{a}\ntwo\n\nthree\nmissing.png\nfour\n{b}\nfive\n"
    done, _ = served(lines, tmp_path, monkeypatch, image=True)
    assert [(one[0], one[3]) for one in done] == [("one", a), ("two", a), ("four", b)]
    told = capsys.readouterr().err
    assert "There is no file missing.png" in told and told.count("No image") == 2
    # With an image for all of them, a line is a prompt, as before.
    done, _ = served("one\ntwo\n", tmp_path, monkeypatch, "--image_path", a, image=True)
    assert [(one[0], one[3]) for one in done] == [("one", a), ("two", a)]


def test_a_terminal_is_asked_for_image_and_file(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "b.png").touch()
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    lines = f"one\n\n\ntwo\n{b}\n{tmp_path}/mine\nthree\n\n/dev/null/x.mp4\n"
    done, _ = served(lines, tmp_path, monkeypatch, "--image_path", a, image=True, terminal=True)
    assert [(one[0], one[1], one[3]) for one in done] == [
        ("one", "video-001.mp4", a), ("two", "mine.mp4", b)
    ]  # fmt: skip
    assert "--save_path" in capsys.readouterr().err  # Of the third.


def test_an_image_is_needed_without_serve() -> None:
    with pytest.raises(ConfigError, match=r"--image_path.*--serve"):
        parse(image_to_video_parser(""), [*I2V, "--prompt", "a cat"])


def test_the_example_generates_with_what_was_set(
    expert_pths, image_base, picture, tmp_path, monkeypatch, capsys
) -> None:
    """Two videos of one model, and each as a run of its own would make it."""
    shared = [
        *("--high_noise_model_path", str(expert_pths[0])),
        *("--low_noise_model_path", str(expert_pths[1])),
        *("--base", str(image_base), "--attention_type", "original"), *SMALL, *EXACT,
    ]  # fmt: skip
    seen: list[torch.Tensor] = []
    write = sampling.write_video

    def kept(videos: torch.Tensor, path: Path) -> None:
        seen.append(videos)
        write(videos, path)

    monkeypatch.setattr(sampling, "write_video", kept)
    main = main_of("turbowan_i2v.py")
    lines = f"{PROMPT}\n{picture}\n/set num_steps 1\n/set sigma_max 50\n{PROMPT}\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main([*shared, "--serve", "--save_path", str(tmp_path / "s.mp4")]) == 0
    alone = [*shared, "--prompt", PROMPT, "--image_path", str(picture)]
    assert main([*alone, "--save_path", str(tmp_path / "a.mp4")]) == 0
    more = ["--num_steps", "1", "--sigma_max", "50"]
    assert main([*alone, *more, "--save_path", str(tmp_path / "b.mp4")]) == 0
    first, second, *expected = seen
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
    assert not torch.equal(first, second)
