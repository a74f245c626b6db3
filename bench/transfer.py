"""Copies of a model: 1 GiB over loopback against curl, and 8 machines on 100 Mbit/s.

curl reads the file from Python's own static file server, in the open, and writes it to
the same disk.  Shoal's copy is encrypted, each MiB of it is hashed, and it is on the
disk when it is said to be there; curl's is not.  *With the same duties*, curl copies
over TLS from OpenSSL's server, which then hashes it, and `sync` writes it.  *Memory* is
the most that a process takes beyond what the coordinator has when it is idle, or what a
copy of 1 KB takes.

The nine machines are network namespaces on a bridge (Linux, as root), each on a link
that `tc tbf` limits to 100 Mbit/s both ways: one has the model, of 512 MiB, and the
others fetch it at the same time.  The time is that of the last one, without the start
of its program.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from processes import Program, free_port, program, server
from report import Goal, Results

ROUNDS = 3
SIZE = 1 << 30  # bytes
SMALL = 1000
SLOW_SIZE = 512 << 20  # on slow links
TOKEN = secrets.token_hex(16)
RECEIVERS = 8
SHAPE = "tbf rate 100mbit burst 128kb latency 50ms"
SWITCH = "shoal-bench-switch"
MACHINES = [f"shoal-bench-{number}" for number in range(RECEIVERS + 1)]
PORT = 4010
SAMPLES = 0.05  # seconds between looks at a process

CURL = "curl, 1 GiB: MB/s"
SAME_DUTIES = "curl with the same duties, 1 GiB: MB/s"
SHOAL = "shoal, 1 GiB: MB/s"
CPU = "shoal, 1 GiB: CPU s of the receiver"
SENDER_CPU = "shoal, 1 GiB: CPU s of the sender"
MEMORY = "shoal, 1 GiB: memory of the receiver, MB"
SENDER_MEMORY = "shoal, 1 GiB: memory of the sender, MB"
ONE = "one machine on 100 Mbit/s: s"
ALL = "8 machines on 100 Mbit/s: s"
ALL_CURL = "8 machines with curl: s"
GOALS = [
    Goal(SHOAL, per=CURL, at_least=0.7),
    Goal(SHOAL, per=SAME_DUTIES),
    Goal(MEMORY, at_most=64),
    Goal(SENDER_MEMORY, at_most=64),
    Goal(ALL, per=ONE, at_most=1.3),
    Goal(ALL, per=ALL_CURL),
]


def measure(rounds: int) -> Results:
    rows = (CURL, SAME_DUTIES, SHOAL, CPU, SENDER_CPU, MEMORY, SENDER_MEMORY)
    results: Results = {row: [] for row in (*rows, ONE, ALL, ALL_CURL)}
    with tempfile.TemporaryDirectory() as folder:
        files = {
            size: fill(Path(folder, str(size)), size)
            for size in (SIZE, SMALL, SLOW_SIZE)
        }
        for _ in range(rounds):
            for row, copy in ((CURL, curl), (SAME_DUTIES, curl_with_duties)):
                results[row].append(SIZE / 1e6 / copy(files[SIZE], Path(folder)))
            for row, value in shoal(files, Path(folder)).items():
                results[row].append(value)
        with machines():
            slow, to = files[SLOW_SIZE], Path(folder)
            results[ONE].append(fetch_slowly(slow, to, 1))
            results[ALL].append(fetch_slowly(slow, to, RECEIVERS))
            results[ALL_CURL].append(curl_slowly(slow, to, RECEIVERS))  # six minutes
    return results


def fill(folder: Path, size: int) -> Path:
    """Write a model of so many bytes; return its folder."""
    folder.mkdir()
    block = os.urandom(min(size, 1_000_003))  # no two chunks are the same
    with (folder / "model.gguf").open("wb") as file:
        while (rest := size - file.tell()) > 0:
            file.write(block[:rest])
    return folder


def curl(files: Path, folder: Path) -> float:
    """Return the seconds of a copy by curl."""
    port = free_port()
    with static_server(files, "127.0.0.1", port):
        return curl_from(f"http://127.0.0.1:{port}/", folder / "got").finish()


def curl_with_duties(files: Path, folder: Path) -> float:
    """Return the seconds of a copy that is encrypted, hashed, and on the disk."""
    port, got, pair = free_port(), folder / "got", folder / "pair.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    execute(f"{make} -subj /CN=localhost -days 1 -keyout {pair} -out {pair}.crt")
    serve = ["openssl", "s_server", "-quiet", "-WWW", "-accept", str(port)]
    serve += ["-key", str(pair), "-cert", f"{pair}.crt"]
    with subprocess.Popen(serve, cwd=files, stderr=subprocess.DEVNULL) as server:
        command = ["curl", "-sk", "-o", str(got), "--retry", "9", "--retry-connrefused"]
        command += ["-w", "%{time_total}", f"https://127.0.0.1:{port}/model.gguf"]
        seconds = float(subprocess.check_output(command))
        server.kill()
    began = monotonic()
    execute(f"openssl dgst -sha256 {got}")
    execute(f"sync {got}")
    assert got.stat().st_size == SIZE, "the server sent all of it"
    got.unlink()
    return seconds + monotonic() - began


@contextmanager
def static_server(
    files: Path, host: str, port: int, within: Sequence[str] = ()
) -> Iterator[None]:
    command = [*within, sys.executable, "-m", "http.server", str(port), "-b", host]
    command += ["-d", str(files)]
    if not within:
        with server(command, f"http://{host}:{port}/"):
            yield
        return
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        answers = [*within, "curl", "-s", "-o", "/dev/null", "--retry", "50"]
        answers += ["--retry-connrefused", "--retry-delay", "1"]
        subprocess.run([*answers, f"http://{host}:{port}/"], check=True)
        try:
            yield
        finally:
            process.kill()


class Copy:
    """A copy that runs; ``peak`` is the most memory that it took, in MB."""

    def __init__(self, command: Sequence[str], got: Path) -> None:
        self._got = got
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.cpu = self.peak = 0.0

    def finish(self) -> float:
        """Wait for it, and remove the copy; return the seconds that it says it took."""
        _, status, usage = os.wait4(self.process.pid, 0)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            printed, errors = self.process.stdout.read(), self.process.stderr.read()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        assert not self.process.returncode, errors
        self.cpu = usage.ru_utime + usage.ru_stime
        self.peak = usage.ru_maxrss / 1e3
        if self._got.is_dir():
            shutil.rmtree(self._got)
            found: dict[str, Any] = json.loads(printed)
            return float(found["seconds"])
        self._got.unlink()
        return float(printed)


def curl_from(url: str, got: Path, within: Sequence[str] = ()) -> Copy:
    command = [*within, "curl", "-s", "-o", str(got), "-w", "%{time_total}"]
    return Copy([*command, f"{url}model.gguf"], got)


def get_from(url: str, got: Path, within: Sequence[str] = ()) -> Copy:
    command = [*within, sys.executable, "-m", "shoal", "models", "get", "model"]
    command += ["--json", "--from", url, "--token", TOKEN, "--to", str(got)]
    return Copy(command, got)


@contextmanager
def sharing(
    files: Path, data: Path, within: Sequence[str] = (), host: str = "127.0.0.1"
) -> Iterator[Program]:
    """Run a coordinator that shares a model."""
    port = str(PORT if within else 0)
    flags = ("--no-discovery", "--log-level", "warning", "--join-token", TOKEN)
    with program(
        *("-m", "shoal", "serve", "--port", port, "--data-dir", str(data)),
        *("--json", "--share", f"model={files}", "--host", host, *flags),
        within=within,
    ) as running:
        yield running


def shoal(files: dict[int, Path], folder: Path) -> dict[str, float]:
    """Copy a small and a large model; return what that takes."""
    peaks = {}
    for size in (SMALL, SIZE):
        with sharing(files[size], folder / f"data-{size}") as running:
            get_from(running.report["url"], folder / "got").finish()  # it hashes
            before, idle = running.cpu(), running.memory()
            with highest(running) as memory:
                copy = get_from(running.report["url"], folder / "got")
                seconds = copy.finish()
            peaks[size] = copy.peak
            cpu = running.cpu() - before
    return {
        SHOAL: SIZE / 1e6 / seconds,
        CPU: copy.cpu,
        SENDER_CPU: cpu,
        MEMORY: peaks[SIZE] - peaks[SMALL],
        SENDER_MEMORY: memory[0] - idle,
    }


@contextmanager
def highest(running: Program) -> Iterator[list[float]]:
    """Yield the most memory in MB that a program has within the block."""
    found, ended = [0.0], Event()

    def look() -> None:
        while not ended.wait(SAMPLES):
            found[0] = max(found[0], running.memory())

    looking = Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        ended.set()
        looking.join()


def fetch_slowly(files: Path, folder: Path, receivers: int) -> float:
    """Return the seconds until all receivers have the model."""
    with sharing(files, folder / "data-slow", inside(0), address(0)):
        url = f"http://{address(0)}:{PORT}"
        get_from(url, folder / "got", inside(0)).finish()  # it hashes
        copies = [
            get_from(url, folder / f"got-{number}", inside(number))
            for number in range(1, receivers + 1)
        ]
        return max([each.finish() for each in copies])


def curl_slowly(files: Path, folder: Path, receivers: int) -> float:
    """Return the same of curl, from one server."""
    with static_server(files, address(0), PORT, inside(0)):
        copies = [
            curl_from(
                f"http://{address(0)}:{PORT}/", folder / f"got-{number}", inside(number)
            )
            for number in range(1, receivers + 1)
        ]
        return max([each.finish() for each in copies])


def address(machine: int) -> str:
    return f"10.98.0.{machine + 1}"


def inside(machine: int) -> list[str]:
    return ["ip", "netns", "exec", MACHINES[machine]]


@contextmanager
def machines() -> Iterator[None]:
    """Make the machines, each on a slow link to a switch."""
    with ExitStack() as stack:
        for each in (SWITCH, *MACHINES):
            execute(f"ip netns add {each}")
            stack.callback(execute, f"ip netns del {each}")
        execute(f"ip -n {SWITCH} link add bridge type bridge")
        execute(f"ip -n {SWITCH} link set bridge up")
        for number, each in enumerate(MACHINES):
            execute(
                f"ip -n {each} link add port type veth peer port{number} netns {SWITCH}"
            )
            execute(f"ip -n {each} addr add {address(number)}/24 dev port")
            execute(f"ip -n {SWITCH} link set port{number} master bridge")
            for where, device in ((each, "port"), (SWITCH, f"port{number}")):
                execute(f"ip -n {where} link set {device} up")
                execute(f"tc -n {where} qdisc add dev {device} root {SHAPE}")
            execute(f"ip -n {each} link set lo up")
        yield


def execute(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
