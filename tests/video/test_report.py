"""The report: its text against `report.golden.html`, and the page in a browser, where a reader
clicks and seeks.

`python -m tests.video.test_report` writes the golden file anew.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.browser import MISSING, Browser, browser, find_chromium
from tests.video.conftest import undrawn
from tests.video.micro import SMALL
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video import report, verdict
from turbo_rcm_patch.video.clips import Clip
from turbo_rcm_patch.video.comparison import compare
from turbo_rcm_patch.video.environment import KernelCheck
from turbo_rcm_patch.video.judging import judge_folders
from turbo_rcm_patch.video.measures import Drift, NetworkNumber
from turbo_rcm_patch.video.report import without_places, write_report
from turbo_rcm_patch.video.result import Judged, ModelFacts
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.verdict import Ran
from turbo_rcm_patch.video.video import PANES, pane_size

GOLDEN = Path(__file__).with_name("report.golden.html")
HOSTILE = "a </script><img src=x onerror=alert(1)> \"'&|`circle` [x](y)"
MODEL = ModelFacts(
    network=NetworkNumber(unpatched=0.004, patched=0.005),
    fusion=3.5e-8,
    attention_backend=None,
    control_backend="math",
    baseline="the unpatched model",
    patch_report="blocks.0.attn1  fused\ntable=/root/.cache/x/tiles.json, next",
    patch={"impl": "reference", "fused": 5, "pairs": [{}] * 6, "guard": []},
    times={
        run: {"first_call_seconds": 9.0, "median_seconds": seconds, "decode_seconds": 1.0,
              "peak_bytes": None}
        for run, seconds in (("baseline", 2.0), ("patched", 1.0))
    },
    identity={
        "model": str(TINY_WAN), "device": "a processor", "dtype": "bfloat16",
        "config": {"attention": "int8", "guard": True},
        "settings": {"sampler": "rcm", "steps": 4, "height": 32, "width": 48, "fps": 16,
                     "lora": ["/home/me/turbo.safetensors:0.8"]},
    },
)  # fmt: skip


def drift(psnr: float, vmaf: float | None) -> Drift:
    return Drift(psnr, 0.998, (psnr + 2, psnr - 1, psnr), vmaf)


def clips(
    lower: float = 3.0, control: bool = True, vmaf: float | None = 98.5, **more: Any
) -> tuple[Clip, ...]:
    """Two clips, so far below a control of 50 and 52 dB."""
    return tuple(
        Clip(
            key=f"key-{i}", prompt=prompt, seed=7 + i, height=32, width=48, fps=16, gain=8,
            patched=drift(psnr - lower, vmaf), control=drift(psnr, vmaf) if control else None,
            **more,
        )
        for i, (prompt, psnr) in enumerate({"a red circle": 50.0, HOSTILE: 52.0}.items())
    )  # fmt: skip


def ran(**calls: int) -> Ran:
    """Two blocks of two steps, of which the second always ran as it was asked."""
    steps = [Counter(calls), Counter(asked=2)]
    return Ran("int8 attention", ["length"], {"blocks.0": steps, "blocks.1": steps})


def of_model(out: Path, lower: float = 3.0, **changes: Any) -> Judged:
    """The result of `compare`; `changes` are of the model or of the numbers of the verdict."""
    results = changes.pop("results", clips(lower))
    model = replace(MODEL, **{k: changes.pop(k) for k in list(changes) if hasattr(MODEL, k)})
    numbers = {"network_ratio": model.network and model.network.ratio, "fusion": model.fusion}
    drifts = [one.patched for one in results], [one.control for one in results]
    return Judged(
        judgement=verdict.judge(*drifts, **{"ran": ran(asked=2)} | numbers | changes),
        results=results, out=out, model=model,
        command="turbo-rcm-patch compare --model /home/me/model --out='/home/me/my out' "
        "--image=file:///home/me/a.png --steps=4",
        versions={"torch": "2.13.0", "python": "3.12"},
    )  # fmt: skip


def of_folders(out: Path, results: tuple[Clip, ...], controls: Any, **changes: Any) -> Judged:
    drifts = [one.patched for one in results]
    return Judged(
        judgement=verdict.judge(drifts, controls), results=results, out=out,
        command="", places={"baseline": "…/before", "candidate": "…/after"},
        **{"refused": {}, "versions": {"torch": "2.13.0"}} | changes,
    )  # fmt: skip


#: Name -> the result that it shows. Of the first of each kind the whole page is in the file.
CASES: dict[str, Callable[[Path], Judged]] = {
    "unchanged": of_model,
    "clips of others": lambda out: of_folders(
        out,
        # equal, and too small for VMAF
        clips(-math.inf, control=False, vmaf=None, unmeasured="VMAF needs 64 pixels a side"),
        None,
        refused={"c": "/home/me/c.pt is incomplete"}, notes=("Clips are .mp4 files",),
    ),
    "similar, on a GPU": lambda out: of_model(
        out, 8.0, times={run: times | {"peak_bytes": 2**30} for run, times in MODEL.times.items()},
        patch=MODEL.patch | {"impl": "triton"},
    ),
    "changed": lambda out: of_model(out, 25.0),
    "undecided, another backend": lambda out: of_model(
        out, attention_backend="sage", network=None, fusion=None, patch={}, ran=None,
        missing=["the network number (an offloaded transformer)"],
        results=clips(unmeasured="this ffmpeg, /home/me/bin/ffmpeg, has no libvmaf"),
    ),
    "left out": lambda out: of_model(out, network=None),
    "not judged": lambda out: of_model(out, ran=ran(exact=3, author=1)),
    "from Python": lambda out: replace(of_model(out, ran=ran(exact=3)), command=""),
}  # fmt: skip


def written(name: str, out: Path) -> str:
    """The page of a case without pictures, style and script, or its head; and the terminal's."""
    judged = CASES[name](out)
    for clip in judged.results:
        folder = out / "prompts" / clip.key
        folder.mkdir(parents=True)
        (folder / "panes.mp4").write_bytes(b"a video")
    check = KernelCheck(0.01, tokens=200, interpreted=True) if name == "unchanged" else None
    with undrawn():
        write_report(judged, check)
    page = judged.report.read_text()
    page = page[page.index("<body>") : page.index('<template id="player">')]
    page = re.sub(r'"data:[^"]*"', '"data:"', page)
    if name not in ("unchanged", "clips of others"):
        page = page[page.index('<section class="verdict') : page.index('<div class="cards"')]
    return f"{page}\n{judged}".replace(str(out), "OUT")


def everything() -> str:
    parts = []
    for name in CASES:
        with tempfile.TemporaryDirectory() as out:
            parts.append(f"<!-- {name} -->\n{written(name, Path(out))}")
    return "\n".join(parts)


def test_the_page_and_the_terminal_say_what_they_said() -> None:
    found = everything()
    assert found.splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()
    pages = re.sub("^verdict:.*?^report:", "", found, flags=re.M | re.S)
    assert "/home/me" not in pages and str(TINY_WAN) not in pages, "a report is sent to others"
    assert "onerror=alert(1)>" not in pages, "a prompt is text"


def test_the_map_of_what_ran_has_a_colour_for_every_form() -> None:
    style = (Path(report.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    for form in ("asked", *verdict.FORMS):
        assert re.search(rf"\.{form}(, \.[\w-]+)* {{ background:", style), form


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--model /home/me/models/wan --steps 4", "--model …/wan --steps 4"),
        ("'/data/my-out'", "'…/my-out'"),
        ("~/videos/a.mp4", "…/a.mp4"),
        (r"C:\Users\me\model", r"…\model"),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        ("outputs/wan and 3 / 4 and e / f", "outputs/wan and 3 / 4 and e / f"),
        ("self/cross/image/feed-forward", "self/cross/image/feed-forward"),
    ],
)
def test_paths_keep_their_last_part(text: str, shown: str) -> None:
    assert without_places(text) == shown == without_places(shown)


def test_panes_are_small_enough_to_be_sent_around() -> None:
    assert pane_size(480, 832) == (480, 832)
    assert pane_size(720, 1280) == (468, 832)
    assert pane_size(64, 96) == (256, 384)
    assert all(one % 2 == 0 for size in ((80, 1296), (48, 64)) for one in pane_size(*size))


# --- in a browser --------------------------------------------------------------------------------

CHROMIUM = find_chromium()
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
PLAYER = "document.querySelector('figure').player"


@pytest.fixture(scope="module")
def pages(pipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    """A comparison of 9 frames, and clips judged without a control."""
    out = tmp_path_factory.mktemp("report")
    size = SMALL | {"height": 64, "width": 96, "num_frames": 9}
    settings = Settings(sampler="rcm", steps=2, guidance_scale=1.0, **size)
    config = PatchConfig(attention="int8", guard=False)
    given: dict[str, Any] = {"settings": settings, "config": config, "network_number": False}
    found = {"compare": compare(pipe, ["a red circle", HOSTILE], out=out / "compare", **given)}
    places = [out / "frames" / which for which in ("baseline", "candidate")]
    for noise, place in zip((0.0, 0.01), places, strict=True):
        place.mkdir(parents=True)
        random = torch.rand(9, 64, 96, 3, generator=torch.Generator().manual_seed(0))
        save_file({"frames": random * 0.9 + noise}, place / "a.safetensors")
    return found | {"frames": judge_folders(*places, out=out / "judged")}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def becomes(tab: Browser, expression: str, value: object) -> None:
    """Wait until an expression has a value: an event may be handled after it was sent."""
    text = json.dumps(value, separators=(",", ":"))
    tab.wait_for(f"JSON.stringify({expression}) === {json.dumps(text)}")


@in_a_browser
@pytest.mark.parametrize(
    ("page", "panes", "width", "dark"),
    [("compare", 10, 1280, False), ("compare", 10, 400, True), ("frames", 3, 800, False)],
)
def test_the_page_fits_and_asks_the_network_for_nothing(
    pages, tab, page: str, panes: int, width: int, dark: bool
) -> None:
    tab.open(pages[page].report, width=width, dark=dark)
    tab.wait_for(f"{PLAYER}.video.readyState >= 2")
    assert tab.complaints == []
    assert [url.partition(":")[0] for url in tab.requests if url[:5] != "data:"] == ["file"]
    assert tab.js("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    assert tab.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert tab.js("document.querySelectorAll('.pane').length") == panes
    # No part of the player lies on another: at 400 pixels the controls covered the picture.
    assert not tab.js(
        """[...document.querySelectorAll('figure[data-player]')].some((figure) => {
          const shown = [...figure.querySelectorAll(
            'canvas, .plot, .time, .tools button, .tools select, output')]
            .filter((e) => e.checkVisibility()).map((e) => e.getBoundingClientRect());
          return shown.some((a, i) => shown.slice(i + 1).some((b) =>
            a.right > b.left + 2 && b.right > a.left + 2
            && a.bottom > b.top + 2 && b.bottom > a.top + 2));
        })"""
    )
    # No table is cut off; only the map of what ran and the patch's report may scroll.
    assert not tab.js(
        "[...document.querySelectorAll('.scroll')].filter((e) => !e.querySelector('.map, pre'))"
        ".some((e) => e.scrollWidth > e.clientWidth)"
    )


@in_a_browser
def test_a_reader_seeks(pages, tab: Browser) -> None:
    """Hovering over the plot and the keys seek, and every pane shows that frame."""
    tab.open(pages["compare"].report, width=1280)
    tab.wait_for(f"{PLAYER}.video.readyState >= 2")
    tab.js(f"{PLAYER}.pause()")
    pixels = (
        f"Object.values({PLAYER}.canvases).map((pane) => pane.getContext('2d')"
        ".getImageData(0, 0, pane.width, pane.height).data.reduce((a, b) => a + b, 0))"
    )
    shown = []
    for share, index in ((0.0, 0), (0.5, 4), (0.999, 8)):
        x, y = tab.centre(".plot", share)
        # A reader's hand shakes: Chromium took the second seek to the last frame for the end.
        for by in (-3, 0, 1):
            tab.mouse("mouseMoved", x, y + by)
        tab.wait_for(
            f"!{PLAYER}.video.seeking && {PLAYER}.wanted === null && {PLAYER}.frame === {index}"
            f" && {PLAYER}.figure.dataset.shown === '{index}'"
        )
        tab.js("new Promise(requestAnimationFrame)")
        at = tab.js(f"{PLAYER}.video.currentTime * {PLAYER}.given.fps")
        assert index <= at <= index + 1, "the end of the last one is the end of the video"
        assert f"frame {index + 1} of 9" in tab.js("document.querySelector('output').textContent")
        shown.append(tab.js(pixels)[: len(PANES)])
    assert all(len({*pane}) == 3 for pane in list(zip(*shown, strict=True))[:3]), "pictures move"
    tab.js("document.querySelector('figure').focus()")
    for key, code, frame in (("Home", 36, 0), ("ArrowRight", 39, 1), ("End", 35, 8)):
        tab.press(key, code)
        tab.wait_for(f"{PLAYER}.frame === {frame}")


@in_a_browser
def test_a_reader_compares(pages, tab: Browser) -> None:
    """Differences and their gain, the slider, and the worst frame."""
    found = pages["compare"]
    tab.open(found.report, width=1280)
    tab.wait_for(f"{PLAYER}.video.readyState >= 2")
    tab.js(f"{PLAYER}.pause()")
    gain, brightness = int(tab.js(f"{PLAYER}.gain")), f"{PLAYER}.canvases['patched difference']"
    tab.js("document.querySelector('figure').focus()")
    tab.press("+", 187, "+")
    becomes(tab, f"[{PLAYER}.gain, {brightness}.style.filter]", [2 * gain, "brightness(2)"])
    visible = (
        "[...document.querySelector('figure').querySelectorAll('.pane')]"
        ".filter((e) => e.checkVisibility()).map((e) => e.dataset.pane)"
    )
    becomes(tab, visible, list(PANES))
    tab.click("[data-part=difference]")
    becomes(tab, visible, ["baseline", "patched", "control"])
    tab.click("[data-part=slider]")
    becomes(tab, visible, [])
    becomes(tab, f"{PLAYER}.halves", ["baseline", "patched"])
    tab.press("d", 68, "d")
    becomes(tab, f"{PLAYER}.halves", ["baseline", "patched difference"])
    values = found.results[0].patched.frame_psnr
    tab.click("[data-part=worst]")
    tab.wait_for(f"{PLAYER}.frame === {values.index(min(values))}")
    assert tab.complaints == []


if __name__ == "__main__":
    GOLDEN.write_text(everything(), encoding="utf-8")
