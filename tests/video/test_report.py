"""The report: what is in its files, and the page in a browser, where a reader clicks and seeks."""

from __future__ import annotations

import json
import math
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.browser import MISSING, Browser, browser, find_chromium
from tests.video.micro import SMALL
from turbo_rcm_patch import PatchConfig
from turbo_rcm_patch.tiny import TINY_WAN
from turbo_rcm_patch.video import comparison, report, verdict
from turbo_rcm_patch.video.comparison import Comparison, compare
from turbo_rcm_patch.video.report import without_places, write_report
from turbo_rcm_patch.video.settings import Settings
from turbo_rcm_patch.video.video import PANES, pane_size

HOSTILE = "a </script><img src=x onerror=alert(1)> \"'&|`circle` [x](y)"
PROMPTS = ["a red circle moves left", HOSTILE]
SETTINGS = Settings(
    sampler="rcm",
    steps=2,
    guidance_scale=1.0,
    **(SMALL | {"height": 64, "width": 96, "num_frames": 9}),
)
COMMAND = "python -m turbo_rcm_patch compare --model /home/me/a model --out '/home/me/my out'"


@pytest.fixture(scope="module")
def found(pipe, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One comparison, looked at by many tests; its prompts are as bad as prompts can be."""
    out = tmp_path_factory.mktemp("report")
    config = PatchConfig(attention="int8", pv="bf16", guard=False)
    return compare(
        pipe, PROMPTS, out=out, settings=SETTINGS, config=config, network_number=False,
        command=COMMAND,
    )  # fmt: skip


def test_the_map_of_what_ran_has_a_colour_for_every_form() -> None:
    style = (Path(report.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    for form in ("asked", *verdict.FORMS):
        assert re.search(rf"\.{form}(, \.[\w-]+)* {{ background:", style), form


class Page(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_prompts_are_text_wherever_they_stand(found: Comparison) -> None:
    text = found.report.read_text()
    page = Page(text)
    assert "onerror=alert(1)>" not in text
    assert len(page.all("script")) == 2 and len(page.all("img")) == 6, "no element of a prompt's"
    players = [f for f in page.all("figure") if "data-player" in f]
    assert [figure["aria-label"] for figure in players] == [f"Player: {p}" for p in PROMPTS]
    for figure in players:
        json.loads(str(figure["data-player"]))


def test_each_plot_says_what_it_shows(found: Comparison) -> None:
    images = Page(found.report.read_text()).all("img")
    texts = [str(image["alt"]) for image in images]
    assert len(set(texts)) == 3 and texts[::2] == texts[1::2], "light and dark show the same"
    assert all(str(image["src"]).startswith("data:") for image in images)
    for text in set(texts):
        assert re.search(r"patched [\d.]+", text) and re.search(r"control [\d.]+", text)


def test_no_local_path_is_shown(found: Comparison) -> None:
    for path in (found.report, found.short_report):
        text = path.read_text()
        assert "/home/me" not in text and str(found.out) not in text
        assert found.identity["model"] not in text, "it is a folder of this machine"
        assert Path(found.identity["model"]).name in text
        assert "turbo_rcm_patch compare" in text and "…/my out" in text


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
        ("table=/root/.cache/x/tiles.json, next", "table=…/tiles.json, next"),
    ],
)
def test_paths_keep_their_last_part(text: str, shown: str) -> None:
    assert without_places(text) == shown


def test_the_measures_stand_beside_the_controls(found: Comparison) -> None:
    text = found.report.read_text()
    table = text[text.index("<h2>Measures") : text.index("<h2>Where the differences")]
    cells = [re.sub(r"<[^>]*>", "", one) for one in re.findall(r"<td>.*?</td>", table)]
    drift = [one.patched for one in found.results]
    assert all(one.vmaf is not None and one.xpsnr is not None for one in drift)
    for name in ("PSNR, dB", "SSIM", "VMAF", "XPSNR, dB", "flicker"):
        assert f'<th scope="row">{name}</th>' in table
    lowest = min(float(str(one.control.vmaf)) for one in found.results)
    assert f"{lowest:.1f}" in cells and f"{min(one.psnr for one in drift):.1f}" in cells


def rewritten(found: Comparison, out: Path, **changes: object) -> tuple[str, str]:
    """The page and its short form of a comparison with other numbers."""
    for name in ("prompts", "plots"):
        (out / name).symlink_to(found.out / name)
    other = replace(found, out=out, **changes)
    write_report(other)
    return other.report.read_text(), other.short_report.read_text()


@pytest.mark.usefixtures("no_pictures")
def test_what_ffmpeg_lacks_is_said(found: Comparison, tmp_path: Path) -> None:
    results = [
        replace(
            one,
            patched=replace(one.patched, vmaf=None),
            control=replace(one.control, vmaf=None),
            unmeasured="this ffmpeg has no libvmaf; FLIP (pip install '/home/me/clone[flip]')",
        )
        for one in found.results
    ]
    page, short = rewritten(found, tmp_path, results=tuple(results))
    for text in (page, short):
        assert "Not measured: this ffmpeg has no libvmaf; FLIP (pip install " in text
        assert "/home/me" not in text and "…/clone[flip]" in text, "a report is sent to others"
    assert re.search(r"\| VMAF \| – \| – \| – \| – \|", short)


@pytest.mark.usefixtures("no_pictures")
def test_the_page_says_which_backend_was_judged(found: Comparison, tmp_path: Path) -> None:
    page, short = rewritten(found, tmp_path, attention_backend="sage")
    assert "attention backend sage" in page and "attention backend sage" in short
    assert '<th scope="col">sage</th>' in page and "sage, median" in short
    assert "sage \\u2212 baseline" in page and "Patched" not in page


def test_the_short_form_is_markdown_without_surprises(found: Comparison) -> None:
    text = found.short_report.read_text()
    assert text.startswith(f"**turbo_rcm_patch: {found.verdict}**")
    assert len(text) < 6_000
    (row,) = (line for line in text.splitlines() if "onerror" in line)
    assert row.count("|") - row.count("\\|") == 5, "a prompt makes no column"
    assert re.search(r"\| ``[^|]*\\\|`circle` \[x\]\(y\)`` \|", row), "and no link, in backticks"
    # A table needs an empty line before it, its rule, and as many cells as its head.
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line.replace("\\|", "") for line in block.splitlines()]
        assert re.fullmatch(r"\|(---\|)+", lines[1])
        assert len({line.count("|") for line in lines}) == 1


@pytest.mark.usefixtures("no_pictures")
def test_the_page_says_first_what_ran(found: Comparison, tmp_path: Path) -> None:
    ran = found.judgement.ran
    assert ran is not None and str(ran) in found.short_report.read_text()
    assert ran.part == ["length"]  # The guard's values in 16 bits are not part of a named type.
    text = found.report.read_text()
    assert "All 2 blocks ran int8 attention in every step" in text and 'class="exact"' not in text
    assert (
        len(re.findall(r'<td class="asked" title="step [12]: int8 attention \(2\)">', text)) == 4
    )
    mostly = {name: [Counter(exact=2), Counter(asked=1, exact=1)] for name in ran.calls}
    given = [[one.patched for one in found.results], [one.control for one in found.results]]
    judgement = verdict.judge(*given, fusion=0.0, ran=replace(ran, calls=mostly))
    text, short = rewritten(found, tmp_path, judgement=judgement)
    head = text[text.index('class="verdict not-judged"') : text.index('class="chips"')]
    assert "<b>Not judged</b>" in head and "All 2 blocks ran exact attention" in head
    assert text.count('<td class="exact"') == 4 and "<b>not judged" not in short
    assert "this is not a verdict on int8 attention" in short


def test_speed_stands_above_and_files_beside(found: Comparison) -> None:
    page = Page(text := found.report.read_text())
    head = text[text.index('class="verdict') : text.index('class="cards"')]
    assert re.search(r"s a video unpatched, .* s patched \(.* times as fast\)", head)
    assert "On a CPU the patch is no faster" in head
    assert "s a video unpatched" in found.short_report.read_text()
    links = [one["href"] for one in page.all("a")]
    assert len(links) == 4 * len(found.results)
    assert all((found.out / str(link)).is_file() for link in links)


def test_a_shipped_model_goes_by_its_name() -> None:
    assert comparison.model_in_words(str(TINY_WAN)) == "tiny, trained on moving shapes"


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("word", ["similar", "changed", "undecided"])
def test_other_verdicts_name_what_is_outside(found: Comparison, tmp_path: Path, word: str) -> None:
    control = [one.control for one in found.results]
    below = {"similar": 8.0, "changed": 30.0, "undecided": 0.0}[word]
    moved = [
        replace(one, psnr=one.psnr - below, frame_psnr=tuple(v - below for v in one.frame_psnr))
        for one in control
    ]
    missing = ["the network number"] if word == "undecided" else []
    judgement = verdict.judge(moved, control, fusion=0.0, missing=missing)
    assert judgement.word == word
    text, _ = rewritten(found, tmp_path, judgement=judgement)
    assert f'class="verdict {word}"' in text and f"<b>{word.capitalize()}</b>" in text
    said = text[text.index('class="verdict') : text.index('class="cards"')]
    assert ("median PSNR:" in said) == (word != "undecided")
    assert ("not measured: the network number" in said) == (word == "undecided")
    assert ("≈ similar" in text) == (word == "similar")
    assert ("✗ outside" in text) == (word == "changed")


def test_panes_are_small_enough_to_be_sent_around() -> None:
    assert pane_size(480, 832) == (480, 832)
    assert pane_size(720, 1280) == (468, 832)
    assert pane_size(64, 96) == (256, 384)
    assert all(one % 2 == 0 for size in ((80, 1296), (48, 64)) for one in pane_size(*size))


# --- in a browser --------------------------------------------------------------------------------

CHROMIUM = find_chromium()
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
PLAYER = "document.querySelector('figure').player"
READY = f"{PLAYER}.video.readyState >= 2"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def pixels(tab: Browser, pane: str) -> int:
    """The sum of all bytes that a pane shows, read from a copy of it."""
    return int(
        tab.js(
            f"(() => {{ const pane = {PLAYER}.canvases[{json.dumps(pane)}];"
            "const copy = document.createElement('canvas');"
            "[copy.width, copy.height] = [pane.width, pane.height];"
            "const pen = copy.getContext('2d', { willReadFrequently: true });"
            "pen.drawImage(pane, 0, 0);"
            "return pen.getImageData(0, 0, copy.width, copy.height).data"
            ".reduce((a, b) => a + b, 0); })()"
        )
    )


def becomes(tab: Browser, expression: str, value: object) -> None:
    """Wait until an expression has a value: an event may be handled after it was sent."""
    text = json.dumps(value, separators=(",", ":"))
    tab.wait_for(f"JSON.stringify({expression}) === {json.dumps(text)}")


def frame(tab: Browser) -> int:
    return int(tab.js("document.querySelector('figure').dataset.frame"))


def rows(png: bytes) -> list[bytes]:
    """The lines of a PNG of 8 bits, unfiltered where their filter is none or "sub"."""
    width, height = struct.unpack(">II", png[16:24])
    data, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    plain = zlib.decompress(data)
    step = len(plain) // height
    assert step > 3 * width
    return [plain[i * step : (i + 1) * step] for i in range(height)]


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True), (400, False)])
def test_the_page_fits_and_asks_the_network_for_nothing(found, tab, tmp_path, width, dark) -> None:
    tab.open(found.report, width=width, dark=dark)
    tab.wait_for(READY)
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(("data:", "file:"))] == []
    assert len([url for url in tab.requests if url.startswith("file:")]) == 1
    assert tab.js("document.documentElement.scrollWidth <= window.innerWidth"), (
        "nothing sticks out"
    )
    assert tab.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    leaves = tab.js(
        "[...document.querySelectorAll('.verdict *, .card *, figure *')]"
        ".filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > 1 + "
        "e.parentElement.closest('.verdict, .card, figure').getBoundingClientRect().right).length"
    )
    assert leaves == 0, "nothing leaves its card"
    # No part of the player lies on another: at 400 pixels the controls covered the picture.
    overlaps = tab.js(
        """(() => {
          const shown = [...document.querySelector('figure').querySelectorAll(
            'canvas, .plot, .time, .tools button, .tools select, output')]
            .filter((e) => e.checkVisibility()).map((e) => e.getBoundingClientRect());
          return shown.flatMap((a, i) => shown.slice(i + 1).filter((b) =>
            a.right > b.left + 2 && b.right > a.left + 2
            && a.bottom > b.top + 2 && b.bottom > a.top + 2)).length;
        })()"""
    )  # fmt: skip
    assert overlaps == 0
    assert tab.js(
        "[...document.querySelectorAll('.tools button')].every((b) => b.offsetHeight >= 36)"
    )
    picture = tab.screenshot(tmp_path / "page.png", whole=True)
    assert len(set(rows(picture))) > 100, "a page and not an empty one"


@in_a_browser
def test_a_reader_clicks_and_seeks(found: Comparison, tab: Browser, tmp_path: Path) -> None:
    tab.open(found.report, width=1280)
    tab.wait_for(READY)
    tab.centre("figure")
    tab.wait_for("document.querySelector('figure').dataset.playing === 'true'")
    tab.click("[data-part=play]")
    tab.wait_for("document.querySelector('figure').dataset.playing === 'false'")

    # Hovering over the plot seeks, and every pane follows in the same frame.
    shown = {}
    for share, index in ((0.0, 0), (0.5, 4), (0.999, 8)):
        x, y = tab.centre(".plot", share)
        tab.mouse("mouseMoved", x, y - 3)
        tab.mouse("mouseMoved", x, y)
        there = f"{PLAYER}.frame === {index} && {PLAYER}.figure.dataset.shown === '{index}'"
        tab.wait_for(there)
        # A reader's hand shakes: Chromium took the second seek to the last frame for the end.
        for by in (1, 2, 1, 0):
            tab.mouse("mouseMoved", x, y + by)
            time.sleep(0.05)
        tab.wait_for(f"!{PLAYER}.video.seeking && {PLAYER}.wanted === null && {there}")
        tab.js("new Promise(requestAnimationFrame)")
        at = tab.js(f"{PLAYER}.video.currentTime * {PLAYER}.given.fps")
        assert index <= at <= index + 1, "the end of the last one is the end of the video"
        assert tab.js("document.querySelector('output').textContent").startswith(
            f"frame {index + 1} of 9"
        )
        shown[index] = [pixels(tab, pane) for pane in PANES]
    assert all(len({shown[i][p] for i in shown}) == 3 for p in range(3)), "pictures move"
    opaque = 255 * 384 * 256
    assert all(sum_ > opaque for one in shown.values() for sum_ in one[:3]), "and are not black"

    # The time line, and the keys.
    tab.js("document.querySelector('.time').focus()")
    tab.press("Home", 36)
    tab.wait_for(f"{PLAYER}.frame === 0")
    tab.press("ArrowRight", 39)
    tab.wait_for(f"{PLAYER}.frame === 1")
    tab.js("document.querySelector('figure').focus()")
    tab.press("ArrowRight", 39)
    tab.press("ArrowRight", 39)
    tab.press("ArrowLeft", 37)
    tab.wait_for(f"{PLAYER}.frame === 2")
    tab.press("End", 35)
    tab.wait_for(f"{PLAYER}.frame === 8")
    tab.press(" ", 32, " ")
    tab.wait_for(f"!{PLAYER}.video.paused")
    tab.press(" ", 32, " ")
    tab.wait_for(f"{PLAYER}.video.paused")

    # Differences, and their gain, which is a filter on the picture.
    gain = int(tab.js(f"{PLAYER}.gain"))
    filtered = f"{PLAYER}.canvases['patched difference'].style.filter"
    tab.press("+", 187, "+")
    becomes(tab, f"[{PLAYER}.gain, {filtered}]", [2 * gain, "brightness(2)"])
    becomes(tab, "document.querySelector('[data-part=gain]').value", str(2 * gain))
    tab.press("-", 189, "-")
    becomes(tab, filtered, "brightness(1)")
    visible = (
        "[...document.querySelectorAll('figure')[0].querySelectorAll('.pane')]"
        ".filter((e) => e.checkVisibility()).map((e) => e.dataset.pane)"
    )
    becomes(tab, visible, list(PANES))
    tab.click("[data-part=difference]")
    becomes(tab, visible, ["baseline", "patched", "control"])
    becomes(tab, "document.querySelector('[data-part=difference]').ariaPressed", "false")
    tab.click("[data-part=difference]")
    becomes(tab, visible, list(PANES))

    # The slider between two of them.
    tab.click("[data-part=slider]")
    becomes(tab, visible, [])
    becomes(tab, f"{PLAYER}.halves", ["baseline", "patched"])
    before = tab.screenshot(tmp_path / "half.png")
    tab.js("document.querySelector('[data-part=split]').focus()")
    frame_before = frame(tab)
    tab.press("ArrowRight", 39)
    at = "document.querySelector('.wipe').style.getPropertyValue('--at')"
    becomes(tab, at, "51%")
    assert frame(tab) == frame_before
    x, y = tab.centre(".wipe", 0.25)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        tab.mouse(kind, x, y)
    tab.wait_for(f"Math.abs(parseFloat({at}) - 25) <= 3")
    louder = "document.querySelector('[data-part=gain]').checkVisibility()"
    becomes(tab, louder, False)  # There is nothing to amplify.
    tab.press("d", 68, "d")
    becomes(tab, f"{PLAYER}.halves", ["baseline", "patched difference"])
    becomes(tab, louder, True)
    tab.js(
        "(() => { const s = document.querySelector('[data-part=right]'); s.value = 'control';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    becomes(tab, f"{PLAYER}.halves", ["baseline", "control difference"])
    assert tab.screenshot(tmp_path / "quarter.png") != before
    assert tab.complaints == []


@in_a_browser
def test_a_reader_blinks_zooms_and_finds_the_worst_frame(found: Comparison, tab: Browser) -> None:
    tab.open(found.report, width=1280)
    tab.wait_for(READY)
    tab.js(f"{PLAYER}.pause()")
    values = found.results[0].patched.frame_psnr
    tab.click("[data-part=worst]")
    tab.wait_for(f"{PLAYER}.frame === {values.index(min(values))}")
    tab.click("[data-part=blink]")
    assert tab.js("document.querySelector('[data-part=blink]').textContent") == "A/B: Baseline"
    tab.js("document.querySelector('figure').focus()")
    tab.press("b", 66)
    tab.wait_for("document.querySelector('[data-part=blink]').textContent === 'A/B: Patched'")
    tab.js(f"{PLAYER}.set('view', 'side')")
    before = pixels(tab, "baseline")
    tab.click("[data-part=zoom]")
    assert pixels(tab, "baseline") != before, "a part of the picture fills the pane"
    tab.click("[data-part=zoom]")
    assert pixels(tab, "baseline") == before


@in_a_browser
def test_keyboard_readers_see_where_they_are(found: Comparison, tab: Browser) -> None:
    tab.open(found.report, width=800)
    tab.wait_for(READY)
    seen = []
    for _ in range(14):
        tab.press("Tab", 9)
        seen.append(
            tab.js(
                "(() => { const e = document.activeElement, s = getComputedStyle(e);"
                "return [e.dataset.part ?? e.id ?? e.tagName, s.outlineStyle !== 'none' &&"
                " parseFloat(s.outlineWidth) >= 2, (e.ariaLabel || e.textContent || '').trim()"
                " || e.labels?.[0]?.textContent]; })()"
            )
        )
    names = [name for name, _, _ in seen]
    for part in ("theme", "time", "play", "back", "next", "side", "slider", "difference", "gain"):
        assert part in names
    assert all(outlined for _, outlined, _ in seen), "focus is visible everywhere"
    assert all(label for _, _, label in seen), "and everything has a name"


@in_a_browser
def test_the_theme_can_be_chosen(found: Comparison, tab: Browser) -> None:
    tab.open(found.report, width=800)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.js(colour)
    shown = (
        "[...document.querySelectorAll('.plots img')].filter((e) => e.checkVisibility())"
        ".map((e) => e.className)"
    )
    assert tab.js(shown) == ["on-light"] * 3
    tab.click("#theme")
    becomes(tab, shown, ["on-dark"] * 3)
    assert tab.js(colour) != light
    tab.open(found.report, width=800)
    assert tab.js("document.documentElement.dataset.theme") == "dark", "it is remembered"
    tab.click("#theme")
    becomes(tab, colour, light)
    tab.js("localStorage.clear()")


@in_a_browser
def test_without_scripts_the_videos_still_play(found: Comparison, tab: Browser) -> None:
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(found.report, width=800)
        assert tab.js("document.querySelectorAll('video[controls]').length") == 2
        assert tab.js("document.querySelector('video').checkVisibility()")
        assert tab.js("document.querySelectorAll('noscript .seen').length") == 2
        assert tab.js("document.querySelectorAll('.plots img.on-light')[0].checkVisibility()")
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.usefixtures("no_pictures")
def test_what_is_not_a_number_is_not_called_equal(found: Comparison, tmp_path: Path) -> None:
    """Of the second prompt. The medians of the page are those of the verdict, too."""
    first, second = found.results
    bad = replace(
        second.patched, psnr=math.nan, frame_psnr=(math.nan,) * 9, latents=math.inf,
        flicker=math.nan,
    )  # fmt: skip
    results = (replace(first, patched=replace(first.patched, psnr=50.0)),)
    results += (replace(second, patched=bad),)
    judged = verdict.judge(
        [one.patched for one in results], [one.control for one in results],
        network_ratio=math.inf, fusion=1e-7,
    )  # fmt: skip
    texts = rewritten(found, tmp_path, results=results, judgement=judged)
    for text in texts:
        network = next(x for x in text.split("\n") if "error of the network" in x)
        assert "not a number (inf)" in network and "equal" not in network
        assert "median PSNR" in text and "not a number (nan)" in text
    page, short = texts
    assert "Patched: not a number in 9 of 9." in page
    assert re.search(r"\| flicker \| not a number \(nan\) \|", short)
    assert re.search(r"\| latents, relative L2 \| .* not a number \(inf\) \|", short)


@pytest.mark.usefixtures("no_pictures")
def test_equal_videos_are_called_equal(found: Comparison, tmp_path: Path) -> None:
    results = [
        replace(one, patched=replace(one.patched, psnr=math.inf, frame_psnr=(math.inf,) * 9))
        for one in found.results
    ]
    control = [one.control for one in results]
    judged = verdict.judge([one.patched for one in results], control, fusion=0.0)
    assert judged.word == "unchanged"
    page, short = rewritten(found, tmp_path, results=tuple(results), judgement=judged)
    assert "Patched: equal in every frame." in page
    assert re.search(r"median PSNR</th><td>equal</td>", page)
    assert "| PSNR, dB | equal |" in short and "inf" not in short.partition("<details>")[0]


@pytest.mark.parametrize(
    "given",
    [
        "--out='/home/John Smith/secret/out'",
        "--image=file:///home/john/pic.png",
        "--out /home/john/o",
    ],
)
def test_folders_do_not_stand_in_the_command_of_the_page(given: str) -> None:
    shown = report.shown_command(f"python -m turbo_rcm_patch compare {given} --steps=4")
    assert "ohn" not in shown and "…/" in shown and shown.endswith("--steps=4")
