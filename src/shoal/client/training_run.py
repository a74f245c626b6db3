"""``shoal.launch``: a script on several machines at once, as ``torchrun`` starts it."""

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from shoal.client.connection import JsonRequest, ResultRequest
from shoal.client.coordinator import CoordinatorAddress, find_coordinator
from shoal.client.encoding import encode_arguments, remote_function
from shoal.client.options import Options
from shoal.client.pending_calls import CallBuilder, CallNumbers
from shoal.client.threaded_calls import CallFuture, ThreadedCalls
from shoal.domain.errors import InvalidRequest, NotFound, PeerError, ShoalError
from shoal.domain.job import GANG_MAX, Gang
from shoal.training import run_events
from shoal.training.launch import member
from shoal.training.launch.script import SHOAL, pack_script, write_output
from shoal.training.run_link import EVENTS, RunLink, RunOver

PathLike: TypeAlias = str | os.PathLike[str]

BACKENDS = (SHOAL, "gloo", "nccl")
PROCESSES_MAX = 64  # of one machine
QUEUE_SECONDS = 3600.0  # for which a run waits for its machines
ACCEPTED_EVERY = 0.02  # seconds between looks whether a call was accepted


class RunFailed(ShoalError):
    """Too many members of a run have failed; the text is the first one's error."""


def launch(
    script: PathLike,
    arguments: Sequence[str] = (),
    *,
    nodes: int,
    min_nodes: int | None = None,
    processes: int = 1,
    backend: str = SHOAL,
    slots: int = 0,
    files: Sequence[PathLike] = (),
    environment: Mapping[str, str] | None = None,
    name: str = "",
    queue: float = QUEUE_SECONDS,
    output: bool = True,
    url: str | None = None,
    api_key: str | None = None,
    data_dir: PathLike | None = None,
    cacert: PathLike | None = None,
) -> "TrainingRun":
    """Start a script on several machines of the pool at once.

    Each machine's worker must run with ``--trust-code``.  The script gets torchrun's
    environment variables, and begins once all machines are free.

    Args:
        script: Python file; its folder is not sent.
        arguments: the script's.
        nodes: number of machines.
        min_nodes: the run ends when fewer machines than these can go on; default: all.
        processes: of the script on each machine.
        backend: ``"shoal"``, ``"gloo"`` or ``"nccl"``: what the script finds in
            ``$SHOAL_RUN_BACKEND``.  Only groups of ``"shoal"`` go on without lost
            ranks.
        slots: of each worker that the script takes; 0: the whole machine.
        files: further files and folders, which are placed beside the script.
        environment: additional environment variables of the script.
        name: shown to those who watch the run; default: the script's.
        queue: seconds for which the run may wait for its machines.
        output: whether the script's files are wanted (``save_output``).  Then a script
            that saves them on rank 0 only restarts when that one is lost.
        url: as for ``shoal.Pool``, as are the rest.
        api_key: see ``url``.
        data_dir: see ``url``.
        cacert: see ``url``.

    Returns:
        The run, whose members are accepted jobs.

    Raises:
        ConfigError: there is no such script or file, or it is too large to be sent.
        InvalidRequest: an argument is invalid.
        ShoalError: the coordinator does not accept the run, or is unreachable.
    """
    least = nodes if min_nodes is None else min_nodes
    for parameter, value, most in (
        ("nodes", nodes, GANG_MAX),
        ("min_nodes", least, nodes),
        ("processes", processes, PROCESSES_MAX),
    ):
        if not 1 <= value <= most:
            text = f"{parameter}={value}: expected 1 to {most}"
            raise InvalidRequest(text, parameter)
    if backend not in BACKENDS:
        expected = ", ".join(BACKENDS)
        raise InvalidRequest(f"backend={backend}: expected one of {expected}")
    path = Path(script)
    archive = pack_script(path, [Path(each) for each in files])
    token = secrets.token_hex(run_events.TOKEN_SIZE)
    gangs = [
        Gang(run_events.run_id_of(token), node, nodes, least, slots)
        for node in range(nodes)
    ]
    address = find_coordinator(url, api_key, data_dir=data_dir, cacert=cacert)
    carrier, numbers = ThreadedCalls(address), CallNumbers()
    function = remote_function(member.run_member, trust=False)
    members: list[CallFuture] = []
    for gang in gangs:
        plan = member.MemberPlan(
            token=token,
            node=gang.rank,
            nodes=nodes,
            processes=processes,
            script=path.name,
            arguments=[*arguments],
            environment={**(environment or {})},
            backend=backend,
            whole_machine=not slots,
            name=name or path.name,
            output=output,
        )
        key = run_events.member_key(gang.id, gang.rank)
        builder = CallBuilder(Options(key=key, gang=gang, queue=queue), numbers)
        encoded = encode_arguments(function, (plan, archive), {})
        future = CallFuture(function.read, carrier)
        future.call = builder.build(function, encoded, future.on_ended)
        carrier.submit(future, future.call)
        members.append(future)
    run = TrainingRun(carrier, address, token, members, least)
    try:
        run.wait_accepted()
    except BaseException:
        with suppress(ShoalError):  # the first error counts
            run.cancel()
        run.close()
        raise
    return run


def fetch_output(
    run_id: str,
    folder: PathLike,
    *,
    url: str | None = None,
    api_key: str | None = None,
    data_dir: PathLike | None = None,
    cacert: PathLike | None = None,
) -> Sequence[str]:
    """Write the files of a run that has ended; return their names.

    The coordinator keeps them as long as the run's jobs.  ``url`` and the rest are as
    for ``launch``.

    Raises NotFound, RunFailed if there are no files, ShoalError, OSError.
    """
    address = find_coordinator(url, api_key, data_dir=data_dir, cacert=cacert)
    carrier = ThreadedCalls(address)
    read: Callable[[bytes], Any] = remote_function(member.run_member, trust=False).read
    results: list[member.MemberResult | None] = []
    try:
        with suppress(NotFound):  # of a machine beyond the last
            for node in range(GANG_MAX):
                path = f"/v1/runs/{quote(run_id, safe='')}/results/{node}"
                try:
                    results.append(carrier.request(ResultRequest(path, read)))
                except NotFound:
                    if not node:
                        raise RunFailed(f"your key has no run {run_id}") from None
                    raise
                except InvalidRequest:  # it has none
                    results.append(None)
        return _write_files(carrier, results, folder, "")
    finally:
        carrier.abandon()


class TrainingRun:
    """A script that runs on several machines; ``launch`` starts it.

    It goes on when the program ends without ``cancel``.
    """

    def __init__(
        self,
        carrier: ThreadedCalls,
        address: CoordinatorAddress,
        token: str,
        members: Sequence[CallFuture],
        least: int,
    ) -> None:
        self.id = run_events.run_id_of(token)
        """The id, for ``shoal jobs explain`` and ``shoal jobs cancel``."""
        self._carrier = carrier
        self._address = address
        self._token = token
        self._members = members
        self._least = least
        self._last = 0  # the newest event that was seen
        self._remarks: list[str] = []  # remarks of the coordinator that were seen
        self._ended: list[Future[Any]] = []  # members, in the order of their ends
        for each in members:
            each.add_done_callback(self._ended.append)

    def __repr__(self) -> str:
        return f"<shoal.launch: run {self.id}>"

    @property
    def jobs(self) -> Sequence[str]:
        """The ids of the members' jobs, by machine."""
        return [each.job_id for each in self._members]

    @property
    def done(self) -> bool:
        """Whether all members have ended."""
        return all(each.done() for each in self._members)

    def events(self, wait: float = 0.5) -> Iterator[run_events.Message | None]:
        """Yield what the members report, until all have ended.

        Each event is a mapping with ``event``, ``rank`` (except remarks of the
        coordinator), ``at`` in Unix seconds and its own fields: ``lines`` of
        ``output``, ``values`` of ``progress``, ``text`` of ``started``, ``ended`` and
        ``remark``.  Yields None after each ``wait`` seconds without one.
        """
        link = RunLink(
            ",".join(self._address.urls),
            self._token,
            tls=self._address.tls,
            purpose=EVENTS,
            greeting=lambda: [{run_events.WATCH: self._last}],
        )
        try:
            while True:
                message = link.receive(wait)
                if message is None and self.done:
                    return
                if message is None:
                    yield None
                elif "event" in message:  # others are for members
                    sequence = message["sequence"]
                    assert isinstance(sequence, int), "the coordinator counts them"
                    self._last = sequence
                    if message["event"] == run_events.REMARK and "rank" not in message:
                        self._remarks.append(str(message["text"]))
                    yield message
        except RunOver:
            while not self.done:  # their ends are on their way
                time.sleep(ACCEPTED_EVERY)
        finally:
            link.close()

    def result(self) -> Sequence[member.MemberResult | None]:
        """Wait for the end; return the results of the members, None of lost ones.

        Raises RunFailed if fewer than ``min_nodes`` members have returned.
        """
        for each in self._members:
            with suppress(CancelledError):
                each.exception()
        results = [_result_of(each) for each in self._members]
        returned = [each for each in results if isinstance(each, dict)]
        if len(returned) < self._least:
            cause = _cause([*map(_result_of, self._ended)])
            raise RunFailed(member.headline(str(cause))) from cause
        return [each if isinstance(each, dict) else None for each in results]

    def save_output(self, folder: PathLike) -> Sequence[str]:
        """Write what the writer left in ``$SHOAL_OUTPUT``; return the files' names.

        The writer is the lowest rank that has left files.  Waits for the end.

        Raises RunFailed, also if there are no files, InvalidRequest, OSError.
        """
        remark = "".join(f": {each}" for each in self._remarks[-1:])
        return _write_files(self._carrier, self.result(), folder, remark)

    def cancel(self) -> None:
        """End the script on all machines; the coordinator has confirmed it then.

        Raises ShoalError if it is unreachable: the run goes on.
        """
        for each in self._members:
            each.cancel()
        path = f"/admin/jobs/{self.id}"
        with suppress(InvalidRequest, NotFound):  # none is open, or accepted yet
            self._carrier.request(JsonRequest(path, object, "DELETE"))

    def close(self) -> None:
        """Disconnect; a run that has not ended goes on."""
        self._carrier.abandon()

    def leave(self) -> None:
        """Disconnect at once: whether ``cancel`` has had an effect is not known."""
        self._carrier.leave()

    def wait_accepted(self) -> None:
        """Wait until the coordinator has stored all members.

        Raises what the first refused one raised.
        """
        while waiting := [each for each in self._members if not each.job_id]:
            if refused := [each for each in waiting if each.done()]:
                refused[0].result()
            time.sleep(ACCEPTED_EVERY)


def _write_files(
    carrier: ThreadedCalls,
    results: Sequence[member.MemberResult | None],
    folder: PathLike,
    remark: str,
) -> Sequence[str]:
    """Write the files of the first that left some; raises RunFailed if there are none.

    ``remark``: how machines were lost.
    """
    files = next((each["files"] for each in results if each and each["files"]), {})
    if not files:
        lost = [f"machine {i}" for i, each in enumerate(results) if each is None]
        returned = f"; {' and '.join(lost)} returned nothing" if lost else ""
        raise RunFailed(f"no rank has left files in $SHOAL_OUTPUT{returned}{remark}")

    def fetch(digest: str) -> bytes:
        data = carrier.request(ResultRequest(f"/v1/blobs/{digest}", bytes))
        if hashlib.sha256(data).hexdigest() != digest:
            raise PeerError(f"the part {digest} of a file is damaged")
        return data

    write_output(files, Path(folder), fetch)
    return [*files]


def _result_of(future: "Future[Any]") -> member.MemberResult | BaseException:
    """Return the result of an ended call, or its error."""
    if future.cancelled():
        return CancelledError("the run was cancelled")
    if (error := future.exception()) is not None:
        return error
    result: member.MemberResult = future.result()
    return result


def _cause(results: Sequence[member.MemberResult | BaseException]) -> BaseException:
    """Return the error that ended a run: the first, as others follow from it.

    A run does not end with a machine without which it goes on.
    """
    errors = [each for each in results if isinstance(each, BaseException)]
    return min(
        errors, key=lambda each: isinstance(each, (CancelledError, member.LeftOut))
    )
