"""Check what torch does not check in a `.pth`: the directory of the archive, and its checksums.

`torch.save` writes a zip of uncompressed records. torch maps such a file without comparing its
checksums, so damage in the middle of it becomes other weights, and a compressed record is used as
its compressed bytes. The directory declares all sizes, so a small file that would unpack to
gigabytes is refused unread.
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

#: First bytes of a zip file, by which torch tells it from its old format.
_ZIP: Final = b"PK\x03\x04"
#: Bytes that the records may declare beyond the file's size. torch compresses none; other programs
#: may compress small ones.
_SLACK: Final = 16 * 2**20
#: Largest pickle. That of a 14B model takes 200 kB; its objects take many times as much memory.
_LARGEST_PICKLE: Final = 64 * 2**20
#: Fixed part of a record's own header, and where the lengths of its name and extra field are.
_HEADER, _LENGTHS = 30, 26
_CHUNK: Final = 8 * 2**20


def check_archive(stream: BinaryIO, name: str) -> list[zipfile.ZipInfo]:
    """Refuse an archive whose directory shows that torch did not write it.

    Args:
        stream: An open `.pth` file.
        name: Its name in errors.

    Returns:
        Its records; none for a file of the format before zip.

    Raises:
        CheckpointError: The directory is damaged, declares more than the file can hold or lists a
            record twice, the file is a TorchScript program, or weights are compressed.
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
    names = Counter(record.filename for record in records)
    declared = sum(record.file_size for record in records)
    pickles = sum(record.file_size for record in records if record.filename.endswith(".pkl"))
    twice = sorted(name for name, count in names.items() if count > 1)
    packed = [r.filename for r in records if r.compress_type and "/data/" in r.filename]
    programs = [name for name in names if name.endswith("/constants.pkl")]
    for wrong, what, expected, got in (
        (declared > size + _SLACK or pickles > _LARGEST_PICKLE,
         "would unpack to more bytes than the file has", f"at most its {size} bytes",
         f"{declared} bytes, {pickles} of them objects to unpickle"),
        (twice, "contains two records with the same name", "each once", ", ".join(twice[:4])),
        (programs, "is a TorchScript program", "a state dict", programs[:1]),
        (packed, "has compressed weights", "records as they are", ", ".join(packed[:4])),
    ):  # fmt: skip
        if wrong:
            raise CheckpointError(
                f"{name} {what}, so it was not read",
                expected=f"{expected}, as torch.save writes it",
                got=str(got),
                remedy="Download it again from where it was published. If you trust it, load it "
                "in the program that wrote it, and save its state dict alone",
            )
    return records


def check_sums(
    stream: BinaryIO,
    name: str,
    records: list[zipfile.ZipInfo],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Read every uncompressed record once, and compare it with its checksum.

    A file that was written without checksums (`torch.serialization.set_crc32_options`) has nothing
    to compare with, and is not read.

    Args:
        stream: An open `.pth` file.
        name: Its name in errors.
        records: The records that `check_archive` returned.
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
        left, checksum = record.file_size, 0
        while left > 0 and (part := stream.read(min(_CHUNK, left))):
            checksum = zlib.crc32(part, checksum)
            left -= len(part)
            done += len(part)
            if progress is not None:
                progress("check", done, total)
        if left or checksum != record.CRC:
            raise CheckpointError(
                f"{name} is damaged: the checksum of its record {record.filename} is wrong",
                expected=f"{record.CRC:08x}",
                got=f"{checksum:08x} of {record.file_size - left} bytes",
                remedy="Download the file again",
            )
