"""The kernels compile with every minor version of Triton that pyproject.toml admits.

Each is fetched by pip into a folder of its own, which goes away afterwards, and compiles what the
launchers start, ahead of time, in a process that imports it in the place of the installed one. A
version counts as fetched or not within two minutes; without a network its test is skipped and says
so. The installed release is test_aot.py's, and those between the ones of `ALWAYS` are fetched with
`--every-target`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from packaging.requirements import Requirement
from packaging.version import Version

from tests.kernels.aot import AMPERE, HOPPER, ROOT, Compiler, case, line
from tests.launches import needs_hopper_kernels

#: A release of each minor version; the newest of those that were there when this was written.
RELEASES = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
#: The first whose Gluon has Hopper's own kernels, see `kernels.gluon`.
GLUON = Version("3.6")
#: The oldest release, the oldest with Gluon, and the newest.
ALWAYS = ("3.4.0", "3.6.0", "3.9.0")


def cases(release: Version) -> list[dict]:
    """One of each family of kernels: portable ones for Ampere, with descriptors for Hopper, and
    Hopper's own where the release has them."""
    portable = {"portable": True, "tuning": {"block_k": 128}}
    sparse = [
        "prepare_tokens_kernel",
        "select_kernel",
        "sparse_attention_kernel",
        "key_value_kernel",
    ]
    found = [
        case("one-launch", AMPERE, 128, only=["one_launch_kernel"]),
        case("attention", AMPERE, 64, norm="layer", lengths=True, lse=True),
        case("project", AMPERE, 128),
        case("sparse", AMPERE, 64, blocks=(128, 64), only=sparse),
        case("int8-linear", AMPERE, 128, **portable),
        case("norm-rows", AMPERE, 128),
        case("norm", AMPERE, 128),
        *[
            case("skip-norm", AMPERE, 128, stream="float32", modulated=modulated)
            | {"name": f"skip-norm {modulated}"}
            for modulated in (True, False)
        ],
        *[
            case("streams", AMPERE, 64, stream=stream, folded=folded)
            | {"name": f"streams {stream} {folded}"}
            for stream, folded in (("float32", False), ("bfloat16", True))
        ],
        case("denoise", AMPERE, 128),
        case("attention", HOPPER, 128, only=["attention_kernel"], **portable),
    ]
    if release >= GLUON:
        found += [
            case("plain-attention", HOPPER, 128, lengths=True),
            case("hopper-linear", HOPPER, 128, schedule="ping-pong-128x128"),
        ]
    return found


@pytest.fixture
def fetched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    """Where a release lies, or None for the installed one."""
    needs_hopper_kernels()
    release = Version(request.param)
    if str(release) not in ALWAYS and not request.config.getoption("--every-target"):
        pytest.skip("the releases between: --every-target")
    if release.release[:2] == Version(triton.__version__).release[:2]:
        yield None
        return
    folder = tmp_path / "triton"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    command += ["--no-input", "--timeout", "10", "--retries", "1", "--only-binary", ":all:"]
    command += ["--target", str(folder), f"triton=={release}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not fetch triton {release} within two minutes")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        pytest.skip(f"pip cannot fetch triton {release} here: {last}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # half a gigabyte each


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fetched", RELEASES, indirect=True)
def test_every_kernel_compiles(
    fetched: Path | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    release = Version(request.node.callspec.params["fetched"])
    path = [ROOT] if fetched is None else [fetched, ROOT]
    compiled = Compiler(sys.executable, tmp_path / "compiled", path)
    try:
        results = compiled(cases(release))
    finally:
        compiled.close()
    broken = "\n".join(line(result) for result in results if "error" in result)
    assert not broken, broken
    used = {Version(result["triton"]).release[:2] for result in results}
    assert used == {release.release[:2]}, "another release compiled"
    names = {result["kernel"] for result in results}
    assert {"statistics_kernel", "prologue_kernel", "one_launch_kernel"} <= names
    assert ("hopper_kernel" in names) == (release >= GLUON)
    # And the mode in which a first forward compiles them, which is a private part of Triton.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-W", "error", str(Path(__file__).parent / "ahead_here.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert done.stdout.split() == [
        str(release),
        *(["True", "2"] if release >= GLUON else ["False", "0"]),
    ]


def test_every_minor_version_that_is_admitted_is_here() -> None:
    """From the least that pyproject.toml admits to the installed one, without a gap."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert all(release in needs["triton"] for release in RELEASES)
    minors = [Version(release).release[:2] for release in RELEASES]
    least = min(Version(s.version) for s in needs["triton"] if s.operator == ">=")
    assert minors[0] == least.release[:2]
    assert minors == [(3, n) for n in range(minors[0][1], minors[-1][1] + 1)]
    assert minors[-1] >= Version(triton.__version__).release[:2]
