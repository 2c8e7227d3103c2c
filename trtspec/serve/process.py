"""What trtspec needs from the operating system to look after a server process, and how to read its log."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Written by every start without a GPU driver.
_HARMLESS = re.compile("CudaDriverHelper|stream for ensemble")
_TELLING = re.compile(r"^E\d{4} |^\S*(Error|Exception)\b|error:|failed to|in use|option ", re.IGNORECASE)


def die_with_parent() -> Callable[[], object] | None:
    """What a child calls before exec, so that it gets a SIGTERM when this process dies, however it dies.

    The kernel sends it when the *thread* that forked ends, so only the main thread may ask: None elsewhere.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def children(parent: int, name: str) -> Iterator[tuple[int, list[str]]]:
    """(pid, arguments) of a process's living children of this name (15 characters, the kernel's)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            state, its_parent = rest.split()[:2]
            if own == name and int(its_parent) == parent and state not in "ZX":
                arguments = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                yield int(folder.name), arguments


def decisive_lines(log: str, most: int = 12) -> list[str]:
    """The lines of a server's log that say why it failed; where none does, its last ones."""
    lines = [
        line.rstrip() for line in log.splitlines() if _TELLING.search(line) and not _HARMLESS.search(line)
    ]
    return (lines or log.splitlines())[-most:]
