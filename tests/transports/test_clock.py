"""Timers of deadlines."""

from dataclasses import dataclass, field

from shoal.transports.clock import DeadlineTimer
from transports.manual_clock import ManualClock


@dataclass
class Machine:
    """A state machine that records when it is ticked, and then has no deadline."""

    clock: ManualClock
    deadline: float | None
    ticks: list[float] = field(default_factory=list)

    def tick(self) -> None:
        self.ticks.append(self.clock.now())
        self.deadline = None

    def advance(self, time: float) -> None:
        self.clock.move(time - self.clock.now())


def machine_with_timer(deadline: float | None) -> tuple[Machine, DeadlineTimer]:
    clock = ManualClock(0.0)
    machine = Machine(clock, deadline)
    timer = DeadlineTimer(clock, lambda: machine.deadline, machine.tick)
    timer.update()
    return machine, timer


def test_machine_is_ticked_at_its_deadline_only() -> None:
    machine, _ = machine_with_timer(5.0)

    for time in (4.9, 5.0, 6.0):
        machine.advance(time)

    assert machine.ticks == [5.0]


def test_later_deadline_does_not_reset_the_timer() -> None:
    machine, timer = machine_with_timer(5.0)

    for deadline in (6.0, 7.0, 8.0):
        machine.deadline = deadline
        timer.update()
    assert [when for when, _ in machine.clock.calls] == [5.0]

    machine.advance(5.0)
    assert machine.ticks == []
    machine.advance(8.0)
    assert machine.ticks == [8.0]


def test_earlier_deadline_is_met() -> None:
    machine, timer = machine_with_timer(5.0)

    machine.deadline = 2.0
    timer.update()
    machine.advance(2.0)

    assert machine.ticks == [2.0]


def test_cancelled_timer_does_not_tick() -> None:
    machine, timer = machine_with_timer(5.0)

    timer.cancel()
    machine.advance(9.0)

    assert machine.ticks == []


def test_no_timer_is_set_without_a_deadline() -> None:
    machine, _ = machine_with_timer(None)

    assert machine.clock.calls == []
