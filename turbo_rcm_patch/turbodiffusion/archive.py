"""Check what torch does not check in a `.pth`: the directory of the archive, and its checksums.

`torch.save` writes a zip of uncompressed records. A mapped file is used without its checksums, so
damage in the middle of it is other weights, and a compressed record is its compressed bytes. Sizes
are declared in the directory, so that a small file that unpacks to gigabytes is refused unread.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO, Final

from turbo_rcm_patch.errors import CheckpointError

#: How a zip file begins, as torch tells it from its old format.
_ZIP: Final = b"PK\x03\x04"
#: How many bytes more than the file's size the records may declare. torch compresses none; other
#: programs may compress small ones.
_SLACK: Final = 16 * 2**20
#: Largest pickle; that of a 14B model takes 200 kB, and its objects many times as much memory.
LARGEST_PICKLE: Final = 64 * 2**20
#: Fixed part of a record's own header, and where the lengths of its name and extra field are.
_HEADER, _LENGTHS = 30, 26
_CHUNK: Final = 8 * 2**20


def check_archive(stream: BinaryIO, name: str) -> list[zipfile.ZipInfo]:
    """Refuse an archive whose directory shows that torch did not write it.

    Args:
        stream: An open `.pth` file.
        name: What to call it.

    Returns:
        Its records; none for a file of the format before zip.

    Raises:
        CheckpointError: The directory is damaged, declares more than the file can hold, lists a
            record twice, is of a TorchScript program, or weights are compressed.
    """
    if stream.read(len(_ZIP)) != _ZIP:
        return []
    size = stream.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{name} is not a torch checkpoint, or is incomplete ({error})",
            remedy="Download the file again",
        ) from error
    stream.seek(0)
    _check(records, size, name)
    return records


def _check(records: list[zipfile.ZipInfo], size: int, name: str) -> None:
    remedy = "It was not read. Download it again from where it was published"
    declared = sum(record.file_size for record in records)
    pickles = sum(record.file_size for record in records if record.filename.endswith(".pkl"))
    if declared > size + _SLACK or pickles > LARGEST_PICKLE:
        raise CheckpointError(
            f"{name} would unpack to more bytes than the file has",
            expected=f"at most its {size} bytes, as torch.save writes it",
            got=f"{declared} bytes, {pickles} of them objects to unpickle",
            remedy=remedy,
        )
    names = [record.filename for record in records]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{name} contains two records with the same name",
            expected="each record once",
            got=", ".join(sorted(twice)[:4]),
            remedy=remedy,
        )
    if any(one.endswith("/constants.pkl") for one in names):
        raise CheckpointError(
            f"{name} is a TorchScript program, so it was not loaded",
            expected="a state dict, as torch.save writes it",
            remedy="Save its state dict alone in the program that wrote it",
        )
    packed = [r.filename for r in records if r.compress_type and "/data/" in r.filename]
    if packed:
        raise CheckpointError(
            f"{name}: the weights in it are compressed",
            expected="records as torch.save writes them, uncompressed",
            got=", ".join(packed[:4]),
            remedy="Load it with torch and save it again, but only if you trust it",
        )


def check_sums(
    stream: BinaryIO,
    name: str,
    records: list[zipfile.ZipInfo],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Read every uncompressed record once, and compare it with its checksum.

    A file that was written without checksums (`torch.serialization.set_crc32_options`) has none to
    compare with, and is not read.

    Args:
        stream: An open `.pth` file.
        name: What to call it.
        records: What `check_archive` returned.
        progress: Called with bytes.

    Raises:
        CheckpointError: A record is damaged.
    """
    stored = [record for record in records if not record.compress_type]
    if not any(record.CRC for record in stored):
        return
    total, done = sum(record.file_size for record in stored), 0
    for record in sorted(stored, key=lambda record: record.header_offset):
        stream.seek(record.header_offset + _LENGTHS)
        lengths = stream.read(4)
        start = _HEADER + (sum(struct.unpack("<HH", lengths)) if len(lengths) == 4 else 0)
        stream.seek(record.header_offset + start)
        left, found = record.file_size, 0
        while left > 0:
            part = stream.read(min(_CHUNK, left))
            if not part:
                break
            found = zlib.crc32(part, found)
            left -= len(part)
            done += len(part)
            if progress is not None:
                progress("check", done, total)
        if left or found != record.CRC:
            raise CheckpointError(
                f"{name} is damaged: the checksum of its record {record.filename} is wrong",
                expected=f"{record.CRC:08x}",
                got=f"{found:08x} of {record.file_size - left} bytes",
                remedy="Download the file again",
            )
