"""``pool.workers``: the connected workers, and operators' orders about them."""

from collections.abc import Mapping, Sequence
from typing import Literal
from urllib.parse import quote

import msgspec

from shoal.client.connection import AsyncSendRequest, JsonRequest, SendRequest

PATH = "/admin/workers"
STATUS_PATH = "/admin/status"


class ConnectedWorker(msgspec.Struct, frozen=True):
    """A connected worker.

    ``busy`` is the number of its jobs, and ``suspension`` why operators give it none:
    ``pending`` (no operator has approved it), ``paused``, ``draining``, ``drained`` (it
    has ended its jobs), ``removed``; or None.
    """

    id: str
    models: tuple[str, ...]
    slots: int
    busy: int
    suspension: str | None


class WorkerOrder(msgspec.Struct, frozen=True):
    """The order in force for a worker, or a machine with all its workers.

    ``by`` is the operator's key, empty if there is no order, and ``since`` a Unix time
    in seconds.  ``workers`` are the connected ones, and ``running`` is the number of
    their jobs.  ``approved`` is what operators have approved: public keys, or the name.
    """

    name: str
    state: Literal["active", "pending", "paused", "draining", "drained", "removed"]
    by: str
    since: float | None
    workers: tuple[str, ...]
    running: int
    approved: tuple[str, ...]


class _Status(msgspec.Struct):
    workers: list[ConnectedWorker]


LIST = JsonRequest(STATUS_PATH, _Status)


class Workers:
    """The workers of a pool, for operators.  All but ``connected`` take an admin's key.

    A name is that of a worker (``id``), or the part of it before the slash, which
    stands for all workers of the machine.
    """

    def __init__(self, send: SendRequest) -> None:
        self._send = send

    def connected(self) -> Sequence[ConnectedWorker]:
        """List the connected workers.

        Raises:
            ShoalError: the coordinator refuses to answer, or is unreachable.
        """
        return self._send(LIST).workers

    def show(self, name: str) -> WorkerOrder:
        """Return the state of a worker.

        Raises:
            NotFound: it is not connected, and there is no order about it.
            ShoalError: the coordinator refuses to answer, or is unreachable.
        """
        return self._send(_request(name))

    def approve(self, name: str) -> WorkerOrder:
        """Approve a worker, which gets no jobs before, with `--approve-nodes`.

        ``remove`` ends it.

        Raises:
            ShoalError: the coordinator refuses it, or is unreachable.
        """
        return self._send(_request(name, "approve"))

    def pause(self, name: str) -> WorkerOrder:
        """Give a worker no new jobs.  It finishes those that it runs.

        Like ``drain`` and ``remove``, it outlives reconnects and restarts.

        Raises:
            ShoalError: the coordinator refuses it, or is unreachable.
        """
        return self._send(_request(name, "pause"))

    def resume(self, name: str) -> WorkerOrder:
        """End a pause, drain or removal.

        Raises:
            NotFound: there is no order about the worker.
            ShoalError: the coordinator refuses it, or is unreachable.
        """
        return self._send(_request(name, "resume"))

    def drain(self, name: str, within: float | None = None) -> WorkerOrder:
        """Let a worker end its jobs, and give it no more until ``resume``.

        It stays connected.

        Args:
            name: the worker or machine.
            within: seconds after which the jobs that still run are given to other
                workers.  None: no limit.

        Returns:
            The order at once; the jobs have ended when ``show(name).state`` is
            ``drained``.

        Raises:
            ShoalError: the coordinator refuses it, or is unreachable.
        """
        return self._send(_request(name, "drain", _limit(within)))

    def remove(self, name: str) -> WorkerOrder:
        """Give a worker's jobs to others, disconnect it; refuse it until ``resume``.

        Raises:
            ShoalError: the coordinator refuses it, or is unreachable.
        """
        return self._send(_request(name, "remove"))


class AsyncWorkers:
    """``Workers`` for coroutines, with the same methods."""

    def __init__(self, send: AsyncSendRequest) -> None:
        self._send = send

    async def connected(self) -> Sequence[ConnectedWorker]:
        """List the connected workers."""
        return (await self._send(LIST)).workers

    async def show(self, name: str) -> WorkerOrder:
        """Return the state of a worker."""
        return await self._send(_request(name))

    async def approve(self, name: str) -> WorkerOrder:
        """Approve a worker, which gets no jobs before, with `--approve-nodes`."""
        return await self._send(_request(name, "approve"))

    async def pause(self, name: str) -> WorkerOrder:
        """Give a worker no new jobs."""
        return await self._send(_request(name, "pause"))

    async def resume(self, name: str) -> WorkerOrder:
        """End a pause, drain or removal."""
        return await self._send(_request(name, "resume"))

    async def drain(self, name: str, within: float | None = None) -> WorkerOrder:
        """Let a worker end its jobs, and give it no more until ``resume``."""
        return await self._send(_request(name, "drain", _limit(within)))

    async def remove(self, name: str) -> WorkerOrder:
        """Give a worker's jobs to others, disconnect it; refuse it until ``resume``."""
        return await self._send(_request(name, "remove"))


def _request(
    name: str, action: str = "", query: Mapping[str, str] | None = None
) -> JsonRequest[WorkerOrder]:
    path = f"{PATH}/{quote(name, safe='')}"
    if not action:
        return JsonRequest(path, WorkerOrder)
    return JsonRequest(f"{path}/{action}", WorkerOrder, "POST", query or {})


def _limit(within: float | None) -> Mapping[str, str]:
    return {} if within is None else {"within": repr(within)}
