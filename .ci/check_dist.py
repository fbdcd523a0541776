"""Check what `make dist` built: one wheel and one source distribution, their contents and sizes.

python .ci/check_dist.py dist
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The weights of the shipped models are nearly all of it; the wheel has one of them.
MOST_MIB = {"wheel": 20, "sdist": 40}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def main(folder: Path) -> int:
    """Print what is wrong with the files in a folder; 0 if nothing is."""
    wrong = list(problems(folder))
    for line in wrong:
        print(line, file=sys.stderr)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    return 1 if wrong else 0


def problems(folder: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    wheels, sdists = (sorted(folder.glob(end)) for end in ("*.whl", "*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        yield f"{folder} holds {len(wheels)} wheels and {len(sdists)} source distributions"
        return
    (wheel,), (sdist,) = wheels, sdists
    for kind, path in (("wheel", wheel), ("sdist", sdist)):
        if path.stat().st_size > MOST_MIB[kind] * 2**20:
            yield f"{path.name} has more than {MOST_MIB[kind]} MiB"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
        own = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
        name = f"{own}METADATA"
        metadata = archive.read(name).decode()
    if "py3-none-any" not in wheel.name:
        yield f"{wheel.name} is not for every system"
    ours = {name for name in inside if not name.startswith(own)}
    yield from _compare("the wheel", ours, {one for one in tracked() if in_package(one)})
    with tarfile.open(sdist) as packed:
        members = {one.name.partition("/")[2] for one in packed.getmembers() if one.isfile()}
    yield from _compare("the source distribution", members - {"PKG-INFO"}, set(tracked()))
    _, _, readme = metadata.partition("\n\n")
    for link in LINK.findall(readme):
        if not link.startswith(("http://", "https://")):
            yield f"the description links to {link}, which a package index cannot follow"
    if "turbo_rcm_patch" not in readme:
        yield "there is no description"


def tracked() -> list[str]:
    """The files of the repository; without git, those of an unpacked source distribution."""
    if not (ROOT / ".git").exists():
        skipped = {"dist", "build", ".venv", "outputs", "PKG-INFO"}
        files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return [
            path.as_posix()
            for path in files
            if path.parts[0] not in skipped and "__pycache__" not in path.parts
        ]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def in_package(name: str) -> bool:
    package, second_model = "turbo_rcm_patch/", "turbo_rcm_patch/tiny/weights/cogvideox/"
    return name.startswith(package) and not name.startswith(second_model)


def _compare(what: str, found: set[str], expected: set[str]) -> Iterator[str]:
    for name in sorted(expected - found):
        yield f"{what} lacks {name}"
    for name in sorted(found - expected):
        yield f"{what} has {name}, which is not in the repository"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
