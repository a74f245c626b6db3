"""One member of a run: starts a script on this machine, and waits for its end.

``shoal train`` calls ``run_member`` on each machine of a gang.  It runs in a task
process; the script's processes belong to that one's process group, so that a cancelled
call ends all of them.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TypedDict

from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks.sent_task import sent_as
from shoal.training import run_events
from shoal.training.launch import MEMBER_CALL
from shoal.training.launch.master_access import (
    MasterDoor,
    MasterForwarder,
    is_reachable,
)
from shoal.training.launch.member_reports import MemberReports
from shoal.training.launch.rank_process import (
    RankProcess,
    ScriptFailed,
    describe_failure,
    headline,
)
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
from shoal.training.launch.script_files import (
    Contents,
    collect_output,
    unpack_script,
)
from shoal.training.relayed_sockets import RelayedSockets
from shoal.training.run_link import EVENTS, RunLink, store_piece, tls_for
from shoal.training.run_rounds import TOO_LATE, Round
from shoal.training.run_token import run_id_of

ROUND_TIMEOUT = 300.0  # seconds until the coordinator must have answered


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
    files: dict[str, Contents]


class LeftOut(Unavailable):
    """The run goes on without this machine: why others ended it is not known here."""


@sent_as(MEMBER_CALL)
def run_member(plan: MemberPlan, archive: bytes) -> MemberResult:
    """Run a script's processes on this machine until they end.

    Raises ScriptFailed with the last lines of standard error, ConfigError if this
    worker cannot run members, Unavailable if the coordinator does not answer, LeftOut.
    """
    coordinator = _own_coordinator()
    reports = MemberReports(plan["node"])
    tls = tls_for(coordinator.fingerprint)
    link = RunLink(
        coordinator.url,
        plan["token"],
        tls=tls,
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
            if not reports.wait(lambda: reports.round.number >= 0, ROUND_TIMEOUT):
                raise Unavailable(f"no answer from {coordinator.url}")
            while not _run_round(plan, coordinator, folder, reports):
                pass  # a machine is lost: the script begins anew on the others
            store = partial(store_piece, coordinator.url, plan["token"], tls)
            return {"machine": gethostname(), "files": collect_output(output, store)}
    finally:
        reports.close()
        link.close()


def _own_coordinator() -> Coordinator:
    """Return the coordinator that this worker joined.  Raises ConfigError."""
    url = os.environ.get(COORDINATOR_URL, "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "this worker cannot run members of a training run: it has to join its "
            "coordinator by an address that begins with http:// or https://"
        )
    return Coordinator(url, os.environ.get(COORDINATOR_FINGERPRINT, ""))


def _run_round(
    plan: MemberPlan, coordinator: Coordinator, folder: Path, reports: MemberReports
) -> bool:
    """Run the script in the present round; return whether it is done.

    If not, there is another round.  Raises ScriptFailed, and LeftOut if the round has
    no place for this machine.
    """
    current = reports.round
    if plan["node"] not in current.nodes:
        raise LeftOut(current.reason or TOO_LATE)
    node = current.nodes.index(plan["node"])
    place = Placement(node, len(current.nodes), plan["processes"])
    with ExitStack() as finally_:
        master = _meet(plan["token"], place, coordinator, reports, current, finally_)
        if master is None:
            return False
        first = place.rank(0)
        reports.event(run_events.STARTED, first, f"{plan['name']} on {gethostname()}")
        try:
            done = _run_processes(
                plan, place, master, coordinator, folder, reports, current
            )
        except ScriptFailed as error:
            reports.event(run_events.ENDED, first, headline(str(error)))
            raise
    text = "with status 0" if done else "the script begins anew"
    reports.event(run_events.ENDED, first, text)
    return done


def _meet(
    token: str,
    place: Placement,
    coordinator: Coordinator,
    reports: MemberReports,
    current: Round,
    finally_: ExitStack,
) -> tuple[str, int] | None:
    """Return the address at which all ranks meet: the one that rank 0's member chooses.

    It holds until ``finally_``.  None: there is another round.  Raises Unavailable if
    this machine has no address.
    """
    try:
        own = own_host(coordinator)
    except OSError as error:
        raise Unavailable(f"no route to {coordinator.url}: {error}") from error

    def relay() -> RelayedSockets:
        return RelayedSockets(coordinator.url, token, coordinator.fingerprint)

    if place.node == 0:
        port = free_port(run_id_of(token))
        if place.nodes > 1:
            door = MasterDoor(relay(), token, own, port)
            finally_.enter_context(closing(door))
            note = f"{current.number} {port} {own} {door.port}"
            reports.leave_note(run_events.MASTER, note)
        return own, port

    def known() -> list[str] | None:
        number, *address = (reports.master or "").split(" ")
        return address if number == str(current.number) else None

    reports.wait(lambda: known() is not None or reports.round != current)
    if (found := known()) is None:
        return None
    port, host = int(found[0]), reachable_host(found[1], own, coordinator)
    if is_reachable(token, host, int(found[2])):
        return host, port
    return finally_.enter_context(closing(MasterForwarder(relay(), port))).address


def _run_processes(
    plan: MemberPlan,
    place: Placement,
    master: tuple[str, int],
    coordinator: Coordinator,
    folder: Path,
    reports: MemberReports,
    current: Round,
) -> bool:
    """Start a process for each rank here, and wait for all.

    Returns False if there is another round meanwhile.  Raises ScriptFailed.
    """
    run_id = run_id_of(plan["token"])
    common = {
        **worker_variables(plan["whole_machine"], place.processes),
        **run_variables(
            plan["token"], plan["backend"], coordinator, output=plan["output"]
        ),
        OUTPUT_FOLDER: str(folder / "output"),
        **plan["environment"],
    }
    command = [sys.executable, plan["script"], *plan["arguments"]]
    running: list[RankProcess] = []
    try:
        for local in range(place.processes):
            variables = torchrun_variables(place, local, master, run_id, current.number)
            running.append(
                RankProcess(
                    place.rank(local),
                    command,
                    {**common, **variables},
                    folder / "script",
                    reports,
                )
            )
        return _wait_for_all(running, plan["script"], reports, current)
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait_stopped()


def _wait_for_all(
    running: Sequence[RankProcess],
    script: str,
    reports: MemberReports,
    current: Round,
) -> bool:
    """Wait until all processes have ended with status 0; False: there is another round.

    Raises ScriptFailed.
    """
    ended: list[RankProcess] = []

    def wait(process: RankProcess) -> None:
        process.wait()
        ended.append(process)
        reports.wake()

    def failed() -> list[RankProcess]:
        return [each for each in ended if each.status != 0]

    for each in running:
        threading.Thread(target=wait, args=(each,), daemon=True).start()
    reports.wait(
        lambda: len(ended) == len(running) or bool(failed()) or reports.round != current
    )
    if failed() and reports.round == current:  # else it follows from what was lost
        raise ScriptFailed(describe_failure(failed()[0], script))
    return len(ended) == len(running) and not failed()
