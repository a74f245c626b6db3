"""Groups of ranks over real sockets, each rank in a thread of its own."""

import logging
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

from harness.speed import scaled
from shoal.domain.errors import InvalidRequest, Unavailable
from shoal.protocols import discover
from shoal.training import rank_port
from shoal.training.compression.codings import CODINGS, CodingName
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.group import RankGroup
from shoal.training.rank_port import (
    GroupEnded,
    GroupMembership,
    RankAddress,
    RankPort,
)
from shoal.transports.blocking.rank_socket import (
    HAS_LOCAL_SOCKETS,
    LOCAL,
    Disconnected,
    RankListener,
)
from shoal.transports.tls import self_signed_tls

T = TypeVar("T")
SECRET = "the secret of this group"
LIMIT = scaled(30.0)  # seconds; a test fails by then


def wire() -> Any:
    return next(each.ranks() for each in discover().values() if each.ranks)


@contextmanager
def ports(
    count: int, *, encrypts: bool = False, local: bool = False
) -> Iterator[list[RankPort]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(
                    RankPort(
                        wire(),
                        RankListener(
                            "127.0.0.1",
                            0,
                            self_signed_tls("rank") if encrypts else None,
                        ),
                        encrypts=encrypts,
                        local=local,
                    )
                )
            )
            for _ in range(count)
        ]


@contextmanager
def groups(
    size: int,
    *,
    encrypts: bool = False,
    local: bool = False,
    timeout: float = LIMIT,
    secrets: dict[int, str] | None = None,
    generations: dict[int, int] | None = None,
) -> Iterator[list[RankGroup]]:
    """Yield the ranks of a group."""
    with (
        ports(size, encrypts=encrypts, local=local) as found,
        ExitStack() as stack,
    ):
        addresses = {
            rank: RankAddress(["127.0.0.1"], port.port, port.id)
            for rank, port in enumerate(found)
        }
        members = []
        for rank, port in enumerate(found):
            membership = GroupMembership(
                "run",
                (generations or {}).get(rank, 0),
                rank,
                size,
                (secrets or {}).get(rank, SECRET),
            )
            links = port.open_group(membership, timeout)
            links.set_addresses(addresses)
            members.append(stack.enter_context(closing(RankGroup(links, timeout))))
        yield members


def together(members: list[RankGroup], call: Callable[[RankGroup], T]) -> list[T]:
    """Call a function for all ranks at once; return the results by rank."""
    with ThreadPoolExecutor(len(members)) as threads:
        return [
            each.result(LIMIT) for each in [threads.submit(call, m) for m in members]
        ]


def listeners_with_one_port(*hosts: str) -> list[RankListener]:
    """Listen at all hosts; others may have a port at one of them already."""
    while True:
        listeners = [RankListener(hosts[0])]
        try:
            for host in hosts[1:]:
                listeners.append(RankListener(host, listeners[0].port))
        except Unavailable:
            for each in listeners:
                each.close()
        else:
            return listeners


def test_a_rank_is_found_at_the_address_where_it_is() -> None:
    here, elsewhere = listeners_with_one_port("127.0.0.1", "127.0.0.2")  # on Linux
    with ports(1) as (first,), ExitStack() as stack:
        second = RankPort(wire(), here, encrypts=False)
        stack.callback(second.close)
        stack.callback(RankPort(wire(), elsewhere, encrypts=False).close)
        hosts = ["127.0.0.3", "127.0.0.2", "127.0.0.1"]  # nobody listens at the first
        members = []
        for rank, port in enumerate([first, second]):
            links = port.open_group(GroupMembership("run", 0, rank, 2, SECRET), LIMIT)
            links.set_addresses(
                {0: RankAddress(hosts, first.port, first.id)}
                | {1: RankAddress(hosts, second.port, second.id)}
            )
            members.append(stack.enter_context(closing(RankGroup(links, LIMIT))))
        sums = together(members, lambda each: each.all_reduce(np.ones(4, np.float32)))
    assert all((each == 2).all() for each in sums)


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_a_rank_of_this_machine_is_reached_by_a_local_socket_if_it_has_one(
    there: bool,
) -> None:
    with ports(1, local=True) as (here,), ports(1, local=there) as (other,):
        (way,) = here.ways_to(RankAddress(["127.0.0.1"], other.port, other.id))
        connection = way(LIMIT)
        connection.close()

        is_local = there and HAS_LOCAL_SOCKETS
        tcp = f"127.0.0.1:{other.port}"
        assert connection.address == (LOCAL if is_local else tcp)


def test_ranks_use_tcp_where_no_local_socket_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_port, "ID_SIZE", 100)  # too long for a socket's name
    with groups(2, local=True) as members:
        sums = together(members, lambda each: each.all_reduce(np.ones(4, np.float32)))
        assert all((each == 2).all() for each in sums)


def test_a_local_socket_ends_with_its_port_and_is_not_used_where_all_is_encrypted() -> (
    None
):
    with ports(1, local=True) as (here,), ports(1, encrypts=True) as (secret,):
        for other in (secret, closed_port()):
            (way,) = here.ways_to(RankAddress(["127.0.0.1"], secret.port, other.id))
            connection = way(LIMIT)
            connection.close()
            assert connection.address == f"127.0.0.1:{secret.port}"
        (way,) = secret.ways_to(RankAddress(["127.0.0.1"], here.port, here.id))
        with pytest.raises(Disconnected, match=f"127.0.0.1:{here.port}"):
            way(LIMIT)  # which expects TLS


def closed_port() -> RankPort:
    with ports(1, local=True) as (port,):
        return port


@pytest.mark.parametrize(
    ("encrypts", "local"),
    [(False, False), (True, False), (False, True)],
    ids=["plain", "tls", "local"],
)
def test_collectives_work_over_sockets(encrypts: bool, local: bool) -> None:
    def train(group: RankGroup) -> tuple[Any, ...]:
        rank, size = group.place
        gradient = np.full(400_000, rank + 1, np.float32)
        mean = group.all_reduce(gradient, "mean", np.empty_like(gradient))
        part = group.reduce_scatter(np.arange(6, dtype=np.int32) * rank)
        everyone = group.all_gather(np.array([rank, rank]))
        begun = group.broadcast(np.full(3, rank), root=1)
        gathered = group.gather(np.array([rank]), root=2)
        scattered = group.scatter(
            np.zeros(1, np.int64),
            [np.array([r]) for r in range(size)] if rank == 0 else (),
        )
        results = [np.zeros(1, np.int64) for _ in range(size)]
        group.all_to_all([np.array([10 * rank + r]) for r in range(size)], results)
        group.barrier()
        if rank == 0:
            group.send(np.array([7]), to=2)
        heard = group.receive(np.zeros(1, np.int64), 0) if rank == 2 else None
        return (
            mean,
            gradient,
            part,
            everyone,
            begun,
            gathered,
            scattered,
            results,
            heard,
        )

    with groups(3, encrypts=encrypts, local=local) as members:
        outcomes = together(members, train)

    for rank, outcome in enumerate(outcomes):
        mean, gradient, part, everyone, begun, gathered, scattered, results, heard = (
            outcome
        )
        assert (mean == 2).all()
        assert (gradient == rank + 1).all(), "the own gradient survives"
        assert part.tolist() == [3 * 2 * rank, 3 * (2 * rank + 1)]
        assert everyone.tolist() == [[0, 0], [1, 1], [2, 2]]
        assert begun.tolist() == [1, 1, 1]
        assert (None if gathered is None else gathered.tolist()) == (
            [[0], [1], [2]] if rank == 2 else None
        )
        assert scattered.tolist() == [rank]
        assert [int(each[0]) for each in results] == [rank, 10 + rank, 20 + rank]
        assert (None if heard is None else int(heard[0])) == (7 if rank == 2 else None)


@pytest.mark.parametrize("compression", CODINGS)
def test_an_all_reduce_in_fewer_bytes_gives_all_the_same_bits(
    compression: CodingName,
) -> None:
    def train(group: RankGroup) -> tuple[Any, Any]:
        gradient = np.random.default_rng(group.place.rank).normal(size=500_000)
        gradient = gradient.astype(np.float32)
        result = np.empty_like(gradient)
        group.all_reduce(gradient, "mean", result, compression=compression)
        return gradient, result

    with groups(3) as members:
        outcomes = together(members, train)

    mean = np.mean([gradient for gradient, _ in outcomes], axis=0)
    assert np.allclose(
        outcomes[0][1], mean, atol=0.25 if compression == "fp8" else 0.03
    )
    assert len({result.tobytes() for _, result in outcomes}) == 1


@pytest.mark.parametrize("compression", ["topk", "auto"])
def test_an_all_reduce_with_error_feedback_gives_all_the_same_bits(
    compression: Literal["topk", "auto"],
) -> None:
    def train(group: RankGroup) -> tuple[Any, Any, Any]:
        feedback = ErrorFeedback(compression, 0.05)
        random = np.random.default_rng(group.place.rank)
        total = np.zeros(300_000)
        for _ in range(2):
            gradient = random.normal(size=total.size).astype(np.float32)
            result = np.empty_like(gradient)
            group.all_reduce(gradient, "sum", result, compression=feedback)
            total += gradient
        return total, feedback.residual, result

    with groups(3) as members:
        outcomes = together(members, train)

    assert len({result.tobytes() for _, _, result in outcomes}) == 1
    assert all(residual is not None for _, residual, _ in outcomes)


def test_a_failed_all_reduce_leaves_the_residual_as_it_was() -> None:
    def train(group: RankGroup) -> bool:
        feedback = ErrorFeedback("topk")
        gradient = np.ones(3000, np.float32)
        group.all_reduce(
            gradient, "mean", np.empty_like(gradient), compression=feedback
        )
        assert feedback.residual is not None
        before = feedback.residual.copy()
        group.barrier()
        if group.place.rank == 1:
            group.abort("killed")
        with pytest.raises(GroupEnded):
            group.all_reduce(gradient, "mean", compression=feedback)
        return np.array_equal(feedback.residual, before)

    with groups(2) as members:
        assert together(members, train) == [True, True]


def test_the_choice_of_a_compression_is_that_of_all_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "shoal.training")

    def train(group: RankGroup) -> bytes:
        gradient = np.random.default_rng(group.place.rank).normal(size=100_000)
        gradient = gradient.astype(np.float32)
        group.all_reduce(gradient, "mean", compression="auto")
        # Of other dtypes there is none.
        assert group.all_reduce(np.array([1]), compression="auto") == [3]
        return gradient.tobytes()

    with groups(3) as members:
        assert len(set(together(members, train))) == 1

    lines = {record.getMessage() for record in caplog.records}
    assert len(lines) == 1, "all ranks have the same figures"
    assert re.fullmatch(
        r"compression=\w+ bytes=400000 rate_mb_s=\S+ delay_ms=\S+ none_ms=\S+ "
        r"fp16_ms=\S+ int8_ms=\S+",
        lines.pop(),
    )


def test_a_group_of_one_needs_nobody() -> None:
    with groups(1) as [group]:
        third = np.full(1, 1 / 3, np.float32)
        assert group.all_reduce(third.copy(), compression="fp16") == third
        assert group.all_reduce(np.array([4.0]), "mean").tolist() == [4.0]
        assert group.all_gather(np.array([4.0])).tolist() == [[4.0]]
        assert group.reduce_scatter(np.array([1, 2])).tolist() == [1, 2]
        group.barrier()


def test_a_rank_that_leaves_ends_the_group_for_all() -> None:
    def train(group: RankGroup) -> str:
        group.barrier()
        if group.place.rank == 1:
            group.abort("killed")

        def train_on() -> None:
            for _ in range(3):
                group.all_reduce(np.zeros(1 << 20, np.float32))

        with pytest.raises(GroupEnded) as ended:
            train_on()
        with pytest.raises(GroupEnded):
            group.barrier()
        return str(ended.value)

    with groups(3) as members:
        reasons = together(members, train)

    assert reasons[1] == "killed"
    assert all("rank" in reason for reason in (reasons[0], reasons[2]))


def test_a_rank_that_is_late_ends_the_group() -> None:
    late = threading.Event()

    def train(group: RankGroup) -> str:
        group.barrier()
        if group.place.rank == 1:
            late.wait(LIMIT)
            return ""
        with pytest.raises(GroupEnded) as ended:
            group.all_reduce(np.zeros(8, np.float32))
        late.set()
        return str(ended.value)

    with groups(2, timeout=scaled(1.0)) as members:
        reasons = together(members, train)

    limit = f"{scaled(1.0):g} s"
    assert reasons[0] == f"rank 1 is late: an operation took longer than {limit}"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda group: group.barrier(), "a segment of kind"),
        (
            lambda group: group.all_reduce(np.zeros(9, np.float32)),
            "do not agree on the size",
        ),
        (
            lambda group: group.all_reduce(np.zeros(8, np.float32), compression="fp16"),
            "a segment of kind",
        ),
        (
            lambda group: (
                group.set_step(4),
                group.all_reduce(np.zeros(8, np.float32)),
            ),
            "a segment of step",
        ),
    ],
    ids=["another collective", "another size", "compression", "another step"],
)
def test_a_rank_that_is_out_of_step_is_an_error(
    other: Callable[[RankGroup], Any], problem: str
) -> None:
    def train(group: RankGroup) -> str:
        group.barrier()

        def train_on() -> None:
            if group.place.rank == 1:
                other(group)
            else:
                group.all_reduce(np.zeros(8, np.float32))
            group.barrier()

        with pytest.raises(GroupEnded) as ended:
            train_on()
        return str(ended.value)

    with groups(2) as members:
        reasons = together(members, train)

    assert any(problem in reason for reason in reasons), reasons


def test_compressions_of_the_same_size_are_not_mistaken_for_each_other() -> None:
    def train(group: RankGroup) -> str:
        name: CodingName = "fp8" if group.place.rank else "int8"
        with pytest.raises(GroupEnded) as ended:
            group.all_reduce(np.zeros(8, np.float32), compression=name)
        return str(ended.value)

    with groups(2) as members:
        reasons = together(members, train)

    assert any("a segment of kind" in reason for reason in reasons), reasons


def test_a_rank_that_ended_before_it_connected_is_not_waited_for() -> None:
    with ports(2) as (here, there):
        links = here.open_group(GroupMembership("run", 0, 0, 2, SECRET), LIMIT)
        address = RankAddress(["127.0.0.1"], there.port, there.id)
        links.set_addresses({1: address})
        there.close()
        with (
            closing(RankGroup(links, LIMIT)) as group,
            pytest.raises(GroupEnded, match="rank 1 ended before it connected"),
        ):
            group.broadcast(np.ones(4), 1)


@pytest.mark.parametrize(
    ("differs", "problem"),
    [
        ({"secrets": {1: "another secret"}}, "has not proved the secret"),
        ({"generations": {1: 3}}, "generation 0 of this group is not open here"),
    ],
    ids=["secret", "generation"],
)
def test_a_rank_of_another_group_is_refused_with_the_reason(
    differs: dict[str, Any], problem: str
) -> None:
    def train(group: RankGroup) -> str:
        with pytest.raises(GroupEnded) as ended:
            group.barrier()
        return str(ended.value)

    with groups(2, timeout=scaled(5.0), **differs) as members:
        reasons = together(members, train)

    assert any(problem in reason for reason in reasons), reasons


def test_strangers_at_the_port_change_nothing() -> None:
    with groups(2) as members, ports(1) as [port]:
        for data in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", bytes(24), b"\xff" * 500):
            with (
                socket.create_connection(("127.0.0.1", port.port)) as stranger,
                suppress(ConnectionResetError),
            ):
                stranger.sendall(data)
                stranger.settimeout(LIMIT)
                assert stranger.recv(100) == b""

        sums = together(members, lambda group: group.all_reduce(np.ones(4)))

    assert [each.tolist() for each in sums] == [[2.0] * 4] * 2


def test_clients_that_reset_their_connections_change_nothing() -> None:
    with groups(2) as members, ports(1) as [port]:
        for _ in range(50):
            client = socket.create_connection(("127.0.0.1", port.port))
            now = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            client.close()

        sums = together(members, lambda group: group.all_reduce(np.ones(4)))

    assert [each.tolist() for each in sums] == [[2.0] * 4] * 2


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    with groups(1) as [group]:
        with pytest.raises(InvalidRequest, match="not in C order"):
            group.all_reduce(np.zeros((4, 4))[:, 1])
        with pytest.raises(InvalidRequest, match="rank 1 of a group of 1"):
            group.broadcast(np.zeros(1), root=1)
        with pytest.raises(InvalidRequest, match="expected 1 arrays of 8 bytes"):
            group.scatter(np.zeros(1), [])
        with pytest.raises(InvalidRequest, match="cannot be divided among 1"):
            group.reduce_scatter(np.array(3.0))
        group.barrier()
