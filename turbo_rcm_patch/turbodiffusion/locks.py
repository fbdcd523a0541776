"""A lock that a process holds on a file as long as it lives, where the system has such locks."""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # Windows
    try:
        import msvcrt
    except ImportError:  # A system with neither.

        def lock_file(descriptor: int) -> None:
            """Raise: there are no locks here."""
            raise OSError("this system has no locks")
    else:

        def lock_file(descriptor: int) -> None:
            """Lock the first byte of a file, or raise an `OSError` if another process has it."""
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
else:

    def lock_file(descriptor: int) -> None:
        """Lock a file, or raise an `OSError` if another process has it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
