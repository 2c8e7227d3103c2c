"""TCP ports: choose free ones, and say who has a busy one before the server fails on it without a name."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from trtspec.errors import SetupError


def claim_ports(address: str, wanted: dict[str, int]) -> dict[str, int]:
    """Ports to listen on at `address`: as wanted, or a free one for each 0. Keys name the settings.

    Raises SetupError naming the setting, the port and, where it can be seen, the process that has it.
    """
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for setting, port in wanted.items():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # The server binds so too: connections of a predecessor in TIME_WAIT do not hold a port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(1)
            except OSError as error:
                raise SetupError(
                    f"cannot listen on {address} port {port}: {error.strerror}{_holder(port)}",
                    where=setting,
                    hint=f"stop that process, or set {setting} to another port (0 chooses a free one)",
                ) from error
            chosen[setting] = listener.getsockname()[1]
    return chosen


def _holder(port: int) -> str:
    """' (python, pid 12)' of the process that listens on a port; empty where the system does not tell."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                return f" ({(process / 'comm').read_text().strip()}, pid {process.name})"
    return ""
