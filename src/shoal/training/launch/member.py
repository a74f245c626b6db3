"""One member of a run: starts a script on this machine, and waits for its end.

``shoal train`` calls ``run_member`` on each machine of a gang.  It runs in a task
process; the script's processes belong to that one's process group, so that a cancelled
call ends all of them.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import IO, TypedDict

from shoal.domain.errors import ConfigError, ShoalError, Unavailable
from shoal.processes.programs import describe_exit
from shoal.tasks.sent_task import sent_as
from shoal.training import run_events, run_link
from shoal.training.launch import MEMBER_CALL, script, script_lines, script_start
from shoal.training.launch.master_access import (
    MasterDoor,
    MasterForwarder,
    is_reachable,
)
from shoal.training.launch.member_reports import MemberReports
from shoal.training.run_events import run_id_of
from shoal.training.run_rounds import TOO_LATE, Round
from shoal.transports.blocking.rank_socket import address_towards
from shoal.transports.relayed_sockets import RelayedSockets, tls_for

STOP_TIMEOUT = 10.0  # seconds that a process has to end after SIGTERM
STDERR_LINES = 20  # of a failed process, in the error
READ_SIZE = 1 << 16  # bytes
ERROR_MAX = 4000  # characters of the error
ROUND_TIMEOUT = 300.0  # seconds until the coordinator must have answered

_RANK = re.compile(r"^\[rank\d+\]: ")  # as PyTorch begins each line
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*: ")  # the line after a traceback


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
    output: bool  # whether files are wanted


class MemberResult(TypedDict):
    """What a member returns: where it ran, and the files that the script left."""

    machine: str
    files: dict[str, script.Contents]


class LeftOut(Unavailable):
    """The run goes on without this machine, for a reason that is not known here."""


@sent_as(MEMBER_CALL)
def run_member(plan: MemberPlan, archive: bytes) -> MemberResult:
    """Run a script's processes on this machine until they end.

    Raises ScriptFailed with the last lines of standard error, ConfigError if this
    worker cannot run members, Unavailable if the coordinator does not answer, LeftOut.
    """
    coordinator = _own_coordinator()
    reports = MemberReports(plan["node"])
    tls = tls_for(coordinator.fingerprint)
    link = run_link.RunLink(
        coordinator.url,
        plan["token"],
        tls=tls,
        purpose=run_link.EVENTS,
        greeting=reports.greeting,
    )
    reports.start(link)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-run-") as name:
            folder = Path(name)
            work, output = folder / "script", folder / "output"
            work.mkdir()
            output.mkdir()
            script.unpack_script(archive, work)
            if not reports.wait(lambda: reports.round.number >= 0, ROUND_TIMEOUT):
                raise Unavailable(f"no answer from {coordinator.url}")
            while not _start(plan, coordinator, folder, reports).run():
                pass  # a machine is lost: the script restarts on the others
            store = partial(run_link.store_piece, coordinator.url, plan["token"], tls)
            return {
                "machine": gethostname(),
                "files": script.collect_output(output, store),
            }
    finally:
        reports.close()
        link.close()


def _own_coordinator() -> script.Coordinator:
    """Return the coordinator that this worker joined.  Raises ConfigError."""
    url = os.environ.get(script.COORDINATOR_URL, "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "this worker cannot run members of a training run: it has to join its "
            "coordinator by an address that begins with http:// or https://"
        )
    return script.Coordinator(url, os.environ.get(script.COORDINATOR_FINGERPRINT, ""))


def _start(
    plan: MemberPlan,
    coordinator: script.Coordinator,
    folder: Path,
    reports: MemberReports,
) -> "_Start":
    """Return the start of the present round.  Raises LeftOut if it is elsewhere."""
    current = reports.round
    if plan["node"] not in current.nodes:
        raise LeftOut(current.reason or TOO_LATE)
    node = current.nodes.index(plan["node"])
    place = script.NodePlace(node, len(current.nodes), plan["processes"])
    return _Start(plan, coordinator, folder, reports, current, place)


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of the script on this machine, in a ``round`` that has its ``place``."""

    plan: MemberPlan
    coordinator: script.Coordinator
    folder: Path
    reports: MemberReports
    round: Round
    place: script.NodePlace

    def run(self) -> bool:
        """Return whether the script is done; if not, there is another round.

        Raises ScriptFailed, and Unavailable if this machine has no address.
        """
        first, event = self.place.rank(0), self.reports.event
        with ExitStack() as finally_:
            if (master := self._meet(finally_)) is None:
                return False
            event(run_events.STARTED, first, f"{self.plan['name']} on {gethostname()}")
            try:
                done = self._run_processes(master)
            except ScriptFailed as error:
                event(run_events.ENDED, first, headline(str(error)))
                raise
        text = "with status 0" if done else "the script restarts"
        event(run_events.ENDED, first, text)
        return done

    @property
    def _is_over(self) -> bool:
        return self.reports.round != self.round

    def _meet(self, finally_: ExitStack) -> tuple[str, int] | None:
        """Return the address at which all ranks meet: rank 0's member chooses it.

        It holds until ``finally_``.  None: there is another round.
        """
        coordinator, token = self.coordinator, self.plan["token"]
        number = str(self.round.number)
        try:
            own = address_towards(coordinator.host, coordinator.port)
        except OSError as error:
            raise Unavailable(f"no route to {coordinator.url}: {error}") from error

        def relay() -> RelayedSockets:
            return run_link.relay_of(coordinator.url, token, coordinator.fingerprint)

        if self.place.node == 0:
            port = script.free_port(run_id_of(token))
            if self.place.nodes > 1:
                door = MasterDoor(relay(), token, own, port)
                finally_.enter_context(closing(door))
                note = f"{number} {port} {own} {door.port}"
                self.reports.leave_note(run_events.MASTER, note)
            return own, port

        def known() -> list[str] | None:
            found, *address = (self.reports.master or "").split(" ")
            return address if found == number else None

        self.reports.wait(lambda: known() is not None or self._is_over)
        if (found := known()) is None:
            return None
        port, host = int(found[0]), script.reachable_host(found[1], own, coordinator)
        # A member of an earlier release has no door: it has to be reachable.
        if len(found) == 2 or is_reachable(token, host, int(found[2])):
            return host, port
        return finally_.enter_context(closing(MasterForwarder(relay(), port))).address

    def _run_processes(self, master: tuple[str, int]) -> bool:
        """Start a process for each rank here, and wait for all.

        Returns False if there is another round meanwhile.
        """
        plan, place, token = self.plan, self.place, self.plan["token"]
        common = {
            **script.worker_variables(plan["whole_machine"], place.processes),
            **script.run_variables(
                token, plan["backend"], self.coordinator, output=plan["output"]
            ),
            script.OUTPUT_FOLDER: str(self.folder / "output"),
            **plan["environment"],
        }
        command = [sys.executable, plan["script"], *plan["arguments"]]
        running: list[RankProcess] = []
        try:
            for local in range(place.processes):
                own = script.torchrun_variables(
                    *(place, local, master, run_id_of(token), self.round.number)
                )
                rank, folder = place.rank(local), self.folder / "script"
                variables = {**common, **own}
                running.append(
                    RankProcess(rank, command, variables, folder, self.reports)
                )
            return self._wait_for_all(running)
        finally:
            for each in running:
                each.terminate()
            for each in running:
                each.wait_stopped()

    def _wait_for_all(self, running: "Sequence[RankProcess]") -> bool:
        """Wait until all processes have ended with status 0, or there is another round.

        Raises ScriptFailed.
        """
        ended: list[RankProcess] = []

        def wait(process: RankProcess) -> None:
            process.wait()
            ended.append(process)
            self.reports.wake()

        def failed() -> list[RankProcess]:
            return [each for each in ended if each.status != 0]

        for each in running:
            threading.Thread(target=wait, args=(each,), daemon=True).start()
        self.reports.wait(
            lambda: len(ended) == len(running) or bool(failed()) or self._is_over
        )
        if failed() and not self._is_over:  # else it follows from what was lost
            raise ScriptFailed(describe_failure(failed()[0], self.plan["script"]))
        return len(ended) == len(running) and not failed()


class ScriptFailed(ShoalError):
    """A process of a script ended with another status than 0."""


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
            [sys.executable, "-I", "-S", starter, str(os.getpid()), *command],
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
        lines = script_lines.OutputLines()
        with stream:
            while data := os.read(stream.fileno(), READ_SIZE):
                for line in lines.feed(data):
                    self._on_line(line, keep)
        for line in lines.end():
            self._on_line(line, keep)

    def _on_line(self, line: str, keep: bool) -> None:
        if line.endswith(script_lines.BAR_END):
            self._reports.bar(self.rank, line)
            return
        if (found := script_lines.hash_in(line)) is not None:
            self._reports.hash(self.rank, *found)
            return
        values, shown = script_lines.values_in(line)
        if values:
            self._reports.values(self.rank, values)
        if keep:
            self.last_errors.append(line)
        if shown:
            self._reports.line(self.rank, line)


def describe_failure(process: "RankProcess", script: str) -> str:
    """Return how a process has failed, with its last lines of standard error."""
    text = (
        f"rank {process.rank} of {script} on {gethostname()} "
        f"{describe_exit(process.status)}"
    )
    if process.last_errors:
        text += "; its last lines:\n" + "\n".join(process.last_errors)
    if len(text) > ERROR_MAX:
        text = f"{text[: ERROR_MAX // 4]}\n[…]\n{text[-3 * ERROR_MAX // 4 :]}"
    return text


def headline(error: str) -> str:
    """Return the first line of a failure, and the one that names its exception."""
    first, _, rest = error.partition("\n")
    first = first.removesuffix("; its last lines:")
    if "SIGKILL" in first:  # of which it could say nothing
        return first
    lines = [_RANK.sub("", each) for each in rest.rstrip().split("\n")]
    named = [each for each in lines if _EXCEPTION.match(each)]
    last = (named or lines)[-1]
    return f"{first}: {last}" if last else first
