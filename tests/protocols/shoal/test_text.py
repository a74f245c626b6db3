"""The connection along which text goes past the hub, without sockets."""

from collections.abc import Sequence

import pytest

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import TextRoute, TextSent
from shoal.protocols.seam.session import Close, Output, Send
from shoal.protocols.shoal.text import (
    ACKNOWLEDGED_AFTER,
    HELLO_TIMEOUT,
    LOST_AFTER,
    NAME_SIZE,
    TextHello,
    TextReceiver,
    TextSender,
    text_ticket,
)

SECRET = b"of the pool"
NAME = b"n" * NAME_SIZE
ROUTE = TextRoute("", NAME, text_ticket(SECRET, NAME))
SENT = TextSent(NAME, 3, ["four", "five"])


class Pair:
    """Both ends, whose clock is at ``now``; ``got`` is what the front received."""

    def __init__(
        self,
        route: TextRoute = ROUTE,
        bindings: tuple[bytes, bytes] = (b"same", b"same"),
    ) -> None:
        self.now = 0.0
        self.sender = TextSender(route)
        self.receiver = TextReceiver(lambda name: text_ticket(SECRET, name))
        self.sender.bind(bindings[0])
        self.receiver.bind(bindings[1])
        self.got: list[object] = []
        self.told: list[object] = []  # the worker
        self.closed: list[Close] = []
        self.receiver.tick(self.now)
        self.to_front(self.sender.tick(self.now))

    def to_front(self, outputs: Sequence[object]) -> None:
        data = tuple(each.data for each in self._sent(outputs))
        if data:
            self.to_worker(self.receiver.receive(data, self.now))

    def to_worker(self, outputs: Sequence[object]) -> None:
        found = [e for e in outputs if isinstance(e, TextHello | TextSent)]
        self.got += found
        data = tuple(each.data for each in self._sent(outputs))
        if data:
            told = self.sender.receive(data, self.now)
            self.told += told
            self._sent(told)

    def _sent(self, outputs: Sequence[object]) -> list[Send]:
        self.closed += [each for each in outputs if isinstance(each, Close)]
        return [each for each in outputs if isinstance(each, Send)]


def test_pieces_arrive_once_both_ends_have_proved_the_ticket() -> None:
    pair = Pair()

    pair.to_front(pair.sender.send(SENT, 0.0))

    assert isinstance(pair.told[0], TextHello)
    assert pair.got[1:] == [SENT]
    assert not pair.closed


@pytest.mark.parametrize(
    ("route", "bindings"),
    [
        pytest.param(
            TextRoute("", NAME, bytes(32)), (b"same", b"same"), id="another ticket"
        ),
        pytest.param(ROUTE, (b"one", b"two"), id="a man in the middle"),
        pytest.param(ROUTE, (b"", b""), id="no encryption"),
    ],
)
def test_an_end_without_the_ticket_is_refused(
    route: TextRoute, bindings: tuple[bytes, bytes]
) -> None:
    pair = Pair(route, bindings)

    assert pair.closed
    assert not pair.got


def test_a_front_that_cannot_prove_it_gets_no_pieces() -> None:
    sender, impostor = TextSender(ROUTE), TextReceiver(lambda name: ROUTE.ticket)
    sender.bind(b"one")
    impostor.bind(b"one")
    (hello,) = sender.tick(0.0)
    assert isinstance(hello, Send)
    (_, answer) = impostor.receive((hello.data,), 0.0)
    assert isinstance(answer, Send)
    other = TextSender(TextRoute("", NAME, bytes(32)))
    other.bind(b"one")
    other.tick(0.0)

    (closed,) = other.receive((answer.data,), 0.0)

    assert isinstance(closed, Close)


def test_pieces_before_a_hello_are_refused() -> None:
    sender, receiver = TextSender(ROUTE), TextReceiver(lambda name: ROUTE.ticket)
    (sent,) = sender.send(SENT, 0.0)
    assert isinstance(sent, Send)

    with pytest.raises(PeerError):
        receiver.receive((sent.data,), 0.0)


def test_what_arrives_is_acknowledged() -> None:
    pair = Pair()
    pair.to_front(pair.sender.send(SENT, 0.0))
    assert pair.receiver.deadline == ACKNOWLEDGED_AFTER

    pair.now = ACKNOWLEDGED_AFTER
    pair.to_worker(pair.receiver.tick(pair.now))

    assert pair.sender.deadline is None
    assert pair.receiver.deadline is None
    assert _tick(pair.sender, 10 * LOST_AFTER) == []


def test_a_connection_on_which_nothing_is_acknowledged_is_closed() -> None:
    pair = Pair()
    pair.sender.send(SENT, 1.0)  # is lost
    pair.sender.send(SENT, 2.0)

    assert pair.sender.deadline == 1.0 + LOST_AFTER
    assert _tick(pair.sender, 0.9 + LOST_AFTER) == []
    (closed,) = _tick(pair.sender, 1.0 + LOST_AFTER)
    assert isinstance(closed, Close)


@pytest.mark.parametrize("end", [TextSender(ROUTE), TextReceiver(lambda name: b"")])
def test_an_end_that_says_nothing_is_given_up(end: TextSender | TextReceiver) -> None:
    end.bind(b"same")
    end.tick(0.0)

    (closed,) = _tick(end, HELLO_TIMEOUT)

    assert isinstance(closed, Close)


def _tick(end: TextSender | TextReceiver, now: float) -> list[Output | object]:
    return [*end.tick(now)]
