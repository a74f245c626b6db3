"""One member of a run: starts a script on this machine, and waits for its end.

``shoal train`` calls ``run_member`` on each machine of a gang.  It runs in a task
process; the script's processes belong to that one's process group, so that a cancelled
call ends all of them.
"""

import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from os import environ, getpid
from pathlib import Path
from socket import gethostname
from typing import IO, TypedDict

from shoal.domain.errors import ConfigError, ShoalError, Unavailable
from shoal.processes.child import describe_exit
from shoal.tasks.sent_task import sent_as
from shoal.training import run_events
from shoal.training.launch import MEMBER_CALL, script_start
from shoal.training.launch.member_reports import MemberReports
from shoal.training.launch.script_environment import (
    COORDINATOR_FINGERPRINT,
    COORDINATOR_URL,
    OUTPUT_FOLDER,
    Coordinator,
    Placement,
    free_port,
    own_host,
    reachable_host,
    run_variables,
    torchrun_variables,
    worker_variables,
)
from shoal.training.launch.script_files import collect_output, unpack_script
from shoal.training.launch.script_lines import hash_in, values_in
from shoal.training.run_events import LINE_MAX
from shoal.training.run_link import EVENTS, RunLink, RunOver
from shoal.training.run_token import run_id_of

MASTER = "master"  # the note with the address of rank 0
MASTER_TIMEOUT = 300.0  # seconds until rank 0 must have left it
STOP_TIMEOUT = 10.0  # seconds that a process has to end after SIGTERM
STDERR_LINES = 20  # of a failed process, in the error
ERROR_MAX = 4000  # characters of the error


class ScriptFailed(ShoalError):
    """A process of a script ended with another status than 0."""


class MemberPlan(TypedDict):
    """What a member runs: the script, its arguments, and its place in the run."""

    token: str
    node: int
    nodes: int
    processes: int
    script: str
    arguments: list[str]
    environment: dict[str, str]
    backend: str
    whole_machine: bool
    name: str


class MemberResult(TypedDict):
    """What a member returns: where it ran, and the files that the script left."""

    machine: str
    files: dict[str, bytes]


@sent_as(MEMBER_CALL)
def run_member(plan: MemberPlan, archive: bytes) -> MemberResult:
    """Run a script's processes on this machine until they end.

    Raises ScriptFailed with the last lines of standard error, ConfigError if this
    worker cannot run members, Unavailable if rank 0 does not appear.
    """
    coordinator = _own_coordinator()
    place = Placement(plan["node"], plan["nodes"], plan["processes"])
    reports = MemberReports()
    link = RunLink(
        coordinator.url,
        plan["token"],
        coordinator.fingerprint,
        purpose=EVENTS,
        greeting=reports.greeting,
    )
    reports.start(link)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-run-") as name:
            folder = Path(name)
            work, output = folder / "script", folder / "output"
            work.mkdir()
            output.mkdir()
            unpack_script(archive, work)
            master = _meet(run_id_of(plan["token"]), place, coordinator, reports)
            first = place.rank(0)
            machine = gethostname()
            reports.event(run_events.STARTED, first, f"{plan['name']} on {machine}")
            try:
                _run_processes(plan, place, master, coordinator, folder, reports)
            except ScriptFailed as error:
                reports.event(run_events.ENDED, first, _headline(str(error)))
                raise
            reports.leave_note(run_events.DONE, machine)
            reports.event(run_events.ENDED, first, "with status 0")
            return {"machine": machine, "files": collect_output(output)}
    finally:
        reports.close()
        link.close()


def _own_coordinator() -> Coordinator:
    """Return the coordinator that this worker joined.  Raises ConfigError."""
    url = environ.get(COORDINATOR_URL, "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "this worker cannot run members of a training run: it has to join its "
            "coordinator by an address that begins with http:// or https://"
        )
    return Coordinator(url, environ.get(COORDINATOR_FINGERPRINT, ""))


def _meet(
    run_id: str, place: Placement, coordinator: Coordinator, reports: MemberReports
) -> tuple[str, int]:
    """Return the address at which all ranks meet: the one that node 0 chooses.

    Raises Unavailable if it does not appear in time, this machine has no address, or
    others are done already.
    """
    try:
        own = own_host(coordinator)
    except OSError as error:
        raise Unavailable(f"no route to {coordinator.url}: {error}") from error
    try:
        ready = reports.wait_until_ready(MASTER_TIMEOUT)
        if reports.has_note(run_events.DONE):
            raise Unavailable("another member is done: this one begins too late")
        if place.node == 0:
            port = free_port(run_id)
            reports.leave_note(MASTER, f"{port} {own}")
            return own, port
        note = reports.wait_for_note(MASTER, MASTER_TIMEOUT) if ready else None
    except RunOver as error:
        raise Unavailable(f"the run has ended: {error}") from error
    number, _, host = (note or "").partition(" ")
    if not number.isdecimal():
        raise Unavailable(f"rank 0 did not appear within {MASTER_TIMEOUT:g} s")
    return reachable_host(host, own, coordinator), int(number)


def _run_processes(
    plan: MemberPlan,
    place: Placement,
    master: tuple[str, int],
    coordinator: Coordinator,
    folder: Path,
    reports: MemberReports,
) -> None:
    """Start a process for each rank here, and wait for all.  Raises ScriptFailed."""
    run_id = run_id_of(plan["token"])
    common = {
        **worker_variables(plan["whole_machine"], place.processes),
        **run_variables(plan["token"], plan["backend"], coordinator),
        OUTPUT_FOLDER: str(folder / "output"),
        **plan["environment"],
    }
    command = [sys.executable, plan["script"], *plan["arguments"]]
    running: list[RankProcess] = []
    try:
        for local in range(place.processes):
            variables = torchrun_variables(place, local, master, run_id)
            running.append(
                RankProcess(
                    place.rank(local),
                    command,
                    {**common, **variables},
                    folder / "script",
                    reports,
                )
            )
        _wait_for_all(running, plan["script"])
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait_stopped()


def _wait_for_all(running: Sequence["RankProcess"], script: str) -> None:
    """Wait until all processes have ended with status 0; raises ScriptFailed."""
    ended: deque[RankProcess] = deque()
    changed = threading.Semaphore(0)

    def wait(process: "RankProcess") -> None:
        process.wait()
        ended.append(process)
        changed.release()

    for each in running:
        threading.Thread(target=wait, args=(each,), daemon=True).start()
    for _ in running:
        changed.acquire()
        process = ended.popleft()
        if process.status != 0:
            raise ScriptFailed(_describe_failure(process, script))


def _describe_failure(process: "RankProcess", script: str) -> str:
    text = (
        f"rank {process.rank} of {script} on {gethostname()} "
        f"{describe_exit(process.status)}"
    )
    if process.last_errors:
        text += "; its last lines:\n" + "\n".join(process.last_errors)
    if len(text) > ERROR_MAX:
        text = f"{text[: ERROR_MAX // 4]}\n[…]\n{text[-3 * ERROR_MAX // 4 :]}"
    return text


def _headline(error: str) -> str:
    """Return the first line of a failure, and its last, which names the exception."""
    first, _, rest = error.partition("\n")
    last = rest.rstrip().rpartition("\n")[2]
    return f"{first.removesuffix('; its last lines:')}: {last}" if last else first


class RankProcess:
    """A process of a script, whose output is reported line by line."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        reports: MemberReports,
    ) -> None:
        self.rank = rank
        self.last_errors: deque[str] = deque(maxlen=STDERR_LINES)
        self._reports = reports
        starter = str(Path(script_start.__file__))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", starter, str(getpid()), *command],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream, keep), daemon=True)
            for stream, keep in (
                (self._process.stdout, False),
                (self._process.stderr, True),
            )
        ]
        for each in self._readers:
            each.start()

    @property
    def status(self) -> int | None:
        """Its exit status; negative: the signal that ended it."""
        return self._process.returncode

    def wait(self) -> None:
        """Wait for its end, and for all of its output."""
        self._process.wait()
        for each in self._readers:
            each.join(STOP_TIMEOUT)  # its own children may keep the pipes open

    def terminate(self) -> None:
        """Ask it to end, if it still runs."""
        self._process.terminate()

    def wait_stopped(self) -> None:
        """Wait for its end; after a while, kill it."""
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, stream: IO[bytes], keep: bool) -> None:
        with stream:
            while data := stream.readline(LINE_MAX):
                line = data.decode(errors="replace").rstrip("\r\n")
                if (found := hash_in(line)) is not None:
                    self._reports.hash(self.rank, *found)
                    continue
                values, shown = values_in(line)
                if values:
                    self._reports.values(self.rank, values)
                if keep:
                    self.last_errors.append(line)
                if shown:
                    self._reports.line(self.rank, line)
