"""Whose webhook is delivered next."""

from dataclasses import replace

from shoal.domain.ids import JobId
from shoal.domain.job import Webhook
from shoal.gateway.jobs.webhook_sender import (
    CONCURRENT_MAX,
    CONCURRENT_PER_KEY_MAX,
    CONCURRENT_PER_LANE_MAX,
    REMEMBERED_MAX,
    WebhookTurns,
)
from shoal.store.webhooks import DeliveryState, WebhookDelivery


def delivery(owner: str, number: int, place: str = "host:443") -> DeliveryState:
    name = JobId(f"{owner}{number}")
    url = f"https://{place}/"
    return DeliveryState(
        WebhookDelivery(name, Webhook(url, "s" * 16)), owner, f"{owner} {place}"
    )


def start(turns: WebhookTurns, due: list[DeliveryState]) -> list[str]:
    """Begin deliveries of those due, in their order, as far as there is room."""

    def choose() -> DeliveryState | None:
        waiting = [each for each in due if each.delivery.job_id not in turns.jobs]
        return turns.choose(waiting, 0.0)

    begun: list[str] = []
    while turns.has_room and (chosen := choose()) is not None:
        turns.begin(chosen)
        begun.append(chosen.delivery.job_id)
    return begun


def test_keys_take_turns() -> None:
    due = [delivery("a", n, f"{n}:1") for n in range(9)]
    due += [delivery("b", n, f"{n}:1") for n in range(2)] + [delivery("c", 0)]

    begun = start(WebhookTurns(), due)

    assert begun == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_one_key_leaves_room_for_the_others() -> None:
    turns = WebhookTurns()

    begun = start(turns, [delivery("a", n, f"{n}:1") for n in range(99)])

    assert len(begun) == CONCURRENT_PER_KEY_MAX < CONCURRENT_MAX


def test_host_and_port_of_a_key_leave_room_for_others() -> None:
    turns = WebhookTurns()
    due = [delivery("a", n, "host:1") for n in range(9)] + [delivery("a", 9, "host:2")]

    assert start(turns, due) == ["a0", "a1", "a9"]
    assert CONCURRENT_PER_LANE_MAX == 2


def test_what_timed_out_shares_one_slot() -> None:
    turns = WebhookTurns()
    due = [delivery("a", n, f"{n}:1") for n in range(4)]
    due += [delivery("b", n, f"{n}:1") for n in range(4)]
    assert len(start(turns, due)) == CONCURRENT_MAX
    for each in due:
        turns.end(each, timed_out=True)

    assert start(turns, due) == ["a0"]
    # The key that waited longer is next.
    for slow, following in [(due[0], "b0"), (due[4], "a0"), (due[0], "b0")]:
        turns.end(slow, timed_out=True)
        assert start(turns, due) == [following]


def test_fast_deliveries_of_one_key_do_not_cost_another_its_turn() -> None:
    turns = WebhookTurns()
    slow_a, slow_b, fast = delivery("a", 0), delivery("b", 0), delivery("c", 0)
    for each in (slow_a, slow_b):
        turns.begin(each)
        turns.end(each, timed_out=True)
    assert start(turns, [slow_a, slow_b, fast]) == ["c0", "a0"]
    turns.end(fast, timed_out=False)
    assert start(turns, [slow_a, slow_b, fast]) == ["c0"]

    turns.end(slow_a, timed_out=True)

    assert start(turns, [slow_a, slow_b]) == ["b0"]


def test_lane_that_answers_again_has_its_slots_again() -> None:
    turns = WebhookTurns()
    due = [delivery("a", n) for n in range(3)]
    turns.begin(due[0])
    turns.end(due[0], timed_out=True)
    turns.begin(due[0])

    turns.end(due[0], timed_out=False)

    assert start(turns, due) == ["a0", "a1"]


def test_key_whose_turn_was_longest_ago_is_next() -> None:
    turns = WebhookTurns()
    order = [delivery(f"key{number}", 0) for number in (3, 0, 2, 1, 4, 6, 5)]
    for each in order:
        turns.begin(each)
        turns.end(each, timed_out=False)
    due = sorted(order, key=lambda each: each.owner)

    assert start(turns, due) == [each.delivery.job_id for each in order]


def test_what_is_due_comes_before_what_is_due_later() -> None:
    turns = WebhookTurns()
    served, later, last = (
        replace(delivery(owner, 0), due_at=due_at)
        for owner, due_at in [("a", 4.0), ("b", 6.0), ("c", 7.0)]
    )
    turns.begin(served)
    turns.end(served, timed_out=False)

    assert turns.choose([last, later, served], 5.0) == served
    assert turns.choose([last, later], 5.0) == later
    assert turns.choose([], 5.0) is None


def test_a_limited_number_of_keys_and_lanes_is_remembered() -> None:
    turns = WebhookTurns()
    due = [delivery(f"key{number}_", 0) for number in range(REMEMBERED_MAX + 5)]
    for each in due:
        turns.begin(each)
        turns.end(each, timed_out=True)

    assert start(turns, due[5:]) == ["key5_0"]
    assert len(turns.full_lanes) == REMEMBERED_MAX
