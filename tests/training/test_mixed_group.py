"""Groups of Shoal's ranks and an imitation of the other programs, over sockets."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.speed import scaled
from originals.macfleet import CollectiveGroup, PeerTransport
from shoal.domain.errors import InvalidRequest
from shoal.protocols import discover
from shoal.training.mixed_group import MixedDataParallel, MixedGroup
from shoal.training.rank_port import GroupEnded
from shoal.transports.blocking.rank_socket import (
    EMPTY,
    AcceptedSocket,
    RankListener,
    RankSocket,
)
from shoal.transports.tls import self_signed_tls

LIMIT = scaled(30.0)  # seconds; a test fails by then
TOKEN = "fleet-token-0001"


def group(
    rank: int,
    names: list[str],
    token: str = "",
    timeout: float = LIMIT,
    tls: bool | None = None,
) -> MixedGroup:
    wire = next(each.mixed_ranks() for each in discover().values() if each.mixed_ranks)
    server = self_signed_tls("rank") if tls or token else None
    listener = RankListener("127.0.0.1", 0, server)
    return MixedGroup(
        wire, listener, rank, names, token=token, timeout=timeout, tls=tls
    )


def gradient(rank: int, length: int = 100_000) -> Any:
    return np.random.default_rng(rank).normal(size=length).astype(np.float32)


def train(own: MixedGroup, addresses: dict[int, tuple[str, int]]) -> list[Any]:
    own.connect(addresses, LIMIT)
    rank = own.place.rank
    session = MixedDataParallel(own)
    begun = session.start(np.full(100_000, rank, np.float32))
    steps = [session.mean_gradient(gradient(rank + 10 * step)) for step in range(3)]
    return [begun, *steps]


async def train_as_others_do(
    transport: PeerTransport, rank: int, names: list[str], ports: dict[int, int]
) -> list[Any]:
    for other, port in ports.items():
        await transport.connect(names[other], port)
    group = CollectiveGroup(rank, names, transport)
    count = np.array([100_000], np.float64)
    await group.gather(count)
    assert (await group.allreduce(count, "sum"))[0] == 100_000 * len(names)
    begun = await group.broadcast(np.full(100_000, rank, np.float32))
    return [begun, *[await group.allreduce(gradient(rank + 10 * s)) for s in range(3)]]


@pytest.mark.parametrize("token", ["", TOKEN], ids=["open", "secure"])
@pytest.mark.parametrize("other_rank", [0, 1, 2])
async def test_a_mixed_ring_trains_with_equal_replicas(
    token: str, other_rank: int
) -> None:
    names = ["alpha-1", "beta-2", "gamma-3"]
    ours = [rank for rank in range(3) if rank != other_rank]
    transport = PeerTransport(names[other_rank], token)
    members = {rank: group(rank, names, token) for rank in ours}
    ports = {rank: member.port for rank, member in members.items()}
    with ThreadPoolExecutor(2) as threads:
        async with transport.listening() as port:
            # The lower of our two ranks dials the others; the other program dials one.
            addresses = {
                ours[0]: {
                    ours[1]: ("127.0.0.1", ports[ours[1]]),
                    other_rank: ("127.0.0.1", port),
                },
                ours[1]: {},
            }
            loop = asyncio.get_running_loop()
            training = [
                loop.run_in_executor(threads, train, members[rank], addresses[rank])
                for rank in ours
            ]
            theirs = await train_as_others_do(
                transport, other_rank, names, {ours[1]: ports[ours[1]]}
            )
            results = await asyncio.gather(*training)
            for member in members.values():
                member.close()

    assert (theirs[0] == 0).all(), "all begin with the parameters of rank 0"
    for step in range(4):
        for result in results:
            assert result[step].tobytes() == theirs[step].tobytes()
    mean = np.mean([gradient(rank) for rank in range(3)], axis=0)
    assert np.allclose(theirs[1], mean, atol=1e-6)


async def test_no_array_overtakes_the_end_of_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = group(0, ["alpha-1", "beta-2"])
    reasons: list[str] = []

    class Watched(RankSocket):
        def send(self, head: bytes, body: memoryview = EMPTY) -> None:
            if head:
                reasons.append(ended(lambda: own.connect({}, 0.0)))
            super().send(head, body)

    def begin(accepted: AcceptedSocket, timeout: float) -> RankSocket:
        return Watched(accepted.socket, accepted.address)

    monkeypatch.setattr("shoal.training.links.begin_server", begin)
    transport = PeerTransport("beta-2")
    await transport.connect("alpha-1", own.port)
    own.connect({}, LIMIT)
    await transport.disconnect()
    own.close()

    assert reasons == ["ranks [1] did not connect within 0 s"]


async def test_two_ranks_exchange_large_arrays_at_once() -> None:
    names = ["alpha-1", "beta-2"]
    transport = PeerTransport("beta-2", TOKEN)
    own = group(0, names, TOKEN)
    with ThreadPoolExecutor(1) as threads:
        async with transport.listening() as port:
            training = asyncio.get_running_loop().run_in_executor(
                threads, train, own, {1: ("127.0.0.1", port)}
            )
            theirs = await train_as_others_do(transport, 1, names, {})
            ours = await training
            own.close()

    assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


def pair(first: Any, second: Any, tls: bool | None = None) -> list[Any]:
    """Connect two of Shoal's ranks, and call a function for each.

    ``tls``: their fleet is open.
    """
    names = ["alpha-1", "beta-2"]
    token = TOKEN if tls is None else ""
    with (
        closing(group(0, names, token, tls=tls)) as a,
        closing(group(1, names, token, tls=tls)) as b,
    ):
        address = {1: ("127.0.0.1", b.port)}
        with ThreadPoolExecutor(2) as threads:
            connected = [
                threads.submit(a.connect, address, LIMIT),
                threads.submit(b.connect, {}, LIMIT),
            ]
            for each in connected:
                each.result()
            running = [threads.submit(first, a), threads.submit(second, b)]
            return [each.result() for each in running]


def ended(call: Any) -> str:
    with pytest.raises(GroupEnded) as error:
        call()
    return str(error.value)


def test_ranks_of_an_open_fleet_may_encrypt() -> None:
    def add(own: MixedGroup) -> list[float]:
        total: list[float] = own.all_reduce(np.ones(2, np.float32), "sum").tolist()
        return total

    assert pair(add, add, tls=True) == [[2.0, 2.0]] * 2


def test_a_rank_that_is_lost_is_named() -> None:
    def leave(own: MixedGroup) -> str:
        return str(own.end("killed"))

    def go_on(own: MixedGroup) -> str:
        return ended(lambda: own.all_reduce(np.ones(2)))

    assert pair(leave, go_on)[1].startswith("rank 0 (127.0.0.1:")


class ArrayClock:
    """Time passes with each array that a rank sends once it is awaited."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent = self._awaited = 0

    def now(self) -> float:
        return self._sent * 0.6 * LIMIT

    def now_that_it_waits(self) -> float:
        with self._changed:
            self._awaited = self._sent + 1
            self._changed.notify_all()
        return self.now()

    def send(self, own: MixedGroup) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._awaited >= own.place.rank, LIMIT)
            self._sent += 1
        own.gather(np.ones(1))


def test_each_received_array_has_a_limit_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["alpha-1", "beta-2", "gamma-3", "delta-4"]
    clock = ArrayClock()
    with ExitStack() as stack:
        ranks = [stack.enter_context(closing(group(rank, names))) for rank in range(4)]
        root, *others = ranks
        threads = stack.enter_context(ThreadPoolExecutor(4))
        ports = {rank: ("127.0.0.1", each.port) for rank, each in enumerate(ranks)}
        connecting = [
            threads.submit(
                each.connect, {to: ports[to] for to in range(each.place.rank)}, LIMIT
            )
            for each in ranks
        ]
        for each in connecting:
            each.result()
        for module, call in (
            ("training.mixed_group", clock.now),
            ("transports.blocking.rank_socket", clock.now_that_it_waits),
        ):
            owned = SimpleNamespace(monotonic=call)
            monkeypatch.setattr(f"shoal.{module}.time", owned)
        sending = [threads.submit(clock.send, each) for each in others]

        gathered = root.gather(np.zeros(1))

        for sent in sending:
            sent.result()
    assert clock.now() > LIMIT
    assert gathered is not None
    assert gathered.tolist() == [[0.0], [1.0], [1.0], [1.0]]


def test_another_operation_ends_the_group() -> None:
    first, second = pair(
        lambda own: ended(lambda: own.all_reduce(np.zeros(3, np.float32))),
        lambda own: ended(
            lambda: [own.all_reduce(np.zeros(5, np.float32)) for _ in range(2)]
        ),
    )

    assert "expected float32 of shape (3,)" in first or "closed" in first
    assert second


def test_a_mean_that_others_discard_ends_the_group() -> None:
    def steps(own: MixedGroup) -> str:
        session = MixedDataParallel(own)
        session.start(np.zeros(4, np.float32))
        zeros = session.mean_gradient(np.array([np.nan, 1, 2, 3], np.float32))
        assert not zeros.any(), "a gradient that is not finite counts as zeros"
        return ended(lambda: session.mean_gradient(np.full(4, 3e6, np.float32)))

    reasons = pair(steps, steps)

    assert all("the replicas differ now" in reason for reason in reasons)


def test_models_that_differ_are_refused() -> None:
    def starts(count: int) -> Any:
        def start(own: MixedGroup) -> str:
            with pytest.raises(InvalidRequest) as error:
                MixedDataParallel(own).start(np.zeros(count, np.float32))
            return str(error.value)

        return start

    reasons = pair(starts(3), starts(4))

    assert reasons[0] == (
        "this rank has 3 parameters, and all ranks together 7: the models differ"
    )


def test_a_model_larger_than_an_array_is_refused_before_anything_is_sent() -> None:
    with closing(group(0, ["alpha-1"])) as own:
        assert own.numbers_max == 67_108_860
        too_large = np.broadcast_to(np.float32(0), 67_108_861)
        with pytest.raises(InvalidRequest, match="at most 67108860 float32 numbers"):
            MixedDataParallel(own).start(too_large)


def test_a_rank_that_is_missing_is_named() -> None:
    with closing(group(0, ["alpha-1", "beta-2", "gamma-3"])) as own:
        assert "ranks [1, 2] did not connect" in ended(lambda: own.connect({}, 0.1))
