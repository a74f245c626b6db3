"""Finds the process that listens on a TCP port, where the system shows it."""

from pathlib import Path

LISTENING = "0A"  # TCP_LISTEN in the kernel's tables


def port_user(port: int, proc: Path = Path("/proc")) -> str | None:
    """Name the program that listens on a TCP port, and its process id.

    Returns None where that cannot be known: on other systems than Linux, and for
    other people's processes.
    """
    sockets = {f"socket:[{inode}]" for inode in _listeners(port, proc)}
    if not sockets:
        return None
    for process in proc.glob("[0-9]*"):
        try:
            links = (str(fd.readlink()) for fd in (process / "fd").iterdir())
            if not sockets.isdisjoint(links):
                name = (process / "comm").read_text().strip()
                return f"{name}, process {process.name}"
        except OSError:
            continue  # not permitted, or gone
    return None


def _listeners(port: int, proc: Path) -> list[str]:
    """Return the inodes of the sockets that listen on a port (see ``man 5 proc``)."""
    inodes = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes
