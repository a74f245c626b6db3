"""Whether and when a request is sent again."""

from itertools import count

import pytest

from shoal.client.errors import ConnectionLost
from shoal.client.reconnection import (
    FIRST_WAIT,
    RECONNECT_TIMEOUT,
    RETRY_DELAYS,
    Attempts,
    Reconnection,
)

REFUSED = ConnectionLost("refused", sent=False)
BROKE = ConnectionLost("the answer is lost")
STOPPING = ConnectionLost("stopping", sent=False, is_stopping=True)
NO_SUCH_NAME = ConnectionLost("no such host", sent=False, is_final=True)


def seconds_waited(error: ConnectionLost, *, repeatable: bool, known: bool) -> float:
    """Return for how long a request is sent again that always fails so."""
    coordinator = Reconnection()
    coordinator.is_known = known
    attempts, now = Attempts(coordinator, repeatable=repeatable), 7.0
    for _ in count():
        pause = attempts.pause(error, now)
        if pause is None:
            return now - 7.0
        now += pause
    raise AssertionError("it counts for ever")


@pytest.mark.parametrize(
    ("error", "repeatable", "known", "limit"),
    [
        (REFUSED, False, False, FIRST_WAIT),  # the URL may be wrong
        (REFUSED, False, True, RECONNECT_TIMEOUT),
        (BROKE, True, False, FIRST_WAIT),
        (BROKE, True, True, RECONNECT_TIMEOUT),
        (BROKE, False, False, 0.0),  # it may have had an effect
        (BROKE, False, True, 0.0),
        (STOPPING, False, False, RECONNECT_TIMEOUT),  # it had none
        (NO_SUCH_NAME, True, False, 0.0),
        (NO_SUCH_NAME, True, True, RECONNECT_TIMEOUT),  # the network may be down
    ],
)
def test_wait_is_bounded_by_what_is_known_of_the_coordinator(
    error: ConnectionLost, repeatable: bool, known: bool, limit: float
) -> None:
    waited = seconds_waited(error, repeatable=repeatable, known=known)

    assert limit - min(RETRY_DELAYS[-1], limit) <= waited <= limit


def test_other_addresses_are_tried_before_a_pause() -> None:
    coordinator = Reconnection()
    attempts = Attempts(coordinator, repeatable=False, addresses=3)

    pauses = [attempts.pause(REFUSED, 0.0) for _ in range(4)]
    assert pauses == [0.0, 0.0, *RETRY_DELAYS[:2]]
    assert coordinator.turn == 4


@pytest.mark.parametrize("repeatable", [True, False])
def test_what_may_have_had_an_effect_is_sent_elsewhere_only_if_repeatable(
    repeatable: bool,
) -> None:
    attempts = Attempts(Reconnection(), repeatable=repeatable, addresses=2)

    assert attempts.pause(BROKE, 0.0) == (0.0 if repeatable else None)


def test_a_name_without_an_address_does_not_end_the_search() -> None:
    attempts = Attempts(Reconnection(), repeatable=True, addresses=2)

    assert [attempts.pause(NO_SUCH_NAME, 0.0) for _ in range(2)] == [0.0, None]


def test_first_attempts_follow_quickly() -> None:
    attempts = Attempts(Reconnection(), repeatable=True)

    pauses = [attempts.pause(REFUSED, 0.0) for _ in RETRY_DELAYS]

    assert pauses == [*RETRY_DELAYS]
