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
_CHUNK: Final = 2**20


def check_archive(
    stream: BinaryIO, name: str, progress: Callable[[str, int, int], None] | None = None
) -> None:
    """Refuse an archive that torch did not write, or whose records differ from their checksums.

    A file of the format before zip passes. One that was written without checksums
    (`torch.serialization.set_crc32_options`) has nothing to compare with.

    Args:
        stream: An open `.pth` file.
        name: Its name in errors.
        progress: Called with bytes.

    Raises:
        CheckpointError: The file is damaged, its directory declares more than it can hold or lists
            a record twice, or weights are compressed.
    """
    if stream.read(len(_ZIP)) != _ZIP:
        return
    size = stream.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            _check_directory(name, records, size)
            stored = [record for record in records if not record.compress_type]
            if any(record.CRC for record in stored):
                _check_sums(archive, stored, progress)
    except CheckpointError:
        raise
    except (
        *(zipfile.BadZipFile, EOFError, OverflowError, RuntimeError, ValueError, struct.error),
    ) as error:
        raise CheckpointError(
            f"{name} is damaged, incomplete or not a torch checkpoint ({error})",
            remedy="Download the file again",
        ) from error


def _check_directory(name: str, records: list[zipfile.ZipInfo], size: int) -> None:
    names = Counter(record.filename for record in records)
    declared = sum(record.file_size for record in records)
    pickles = sum(record.file_size for record in records if record.filename.endswith(".pkl"))
    twice = [name for name, count in names.items() if count > 1]
    packed = [r.filename for r in records if r.compress_type and "/data/" in r.filename]
    if declared > size + _SLACK or pickles > _LARGEST_PICKLE:
        wrong = f"would unpack to more bytes than the file has, {declared} of {size}, {pickles} "
        wrong += "of them objects to unpickle"
    elif twice:
        wrong = f"contains two records with the same name, {twice[0]}"
    elif packed:
        wrong = f"has compressed weights, {packed[0]}"
    else:
        return
    raise CheckpointError(
        f"{name} {wrong}, so it was not read",
        expected="records as torch.save writes them",
        remedy="Download it again from where it was published. If you trust it, load it in the "
        "program that wrote it, and save its state dict alone",
    )


def _check_sums(
    archive: zipfile.ZipFile,
    records: list[zipfile.ZipInfo],
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Read records to their end, where `zipfile` compares the checksum."""
    total, done = sum(record.file_size for record in records), 0
    for record in sorted(records, key=lambda record: record.header_offset):
        with archive.open(record) as file:
            while part := file.read(_CHUNK):
                done += len(part)
                if progress is not None:
                    progress("check", done, total)
