"""When those that stand by find the holder of a shared database lost."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shoal.store.lease import (
    FREE_FOR,
    LOOK_MAX,
    SILENT_MAX,
    LeaseRow,
    LeaseVerdict,
    LeaseWatch,
)

EVERY = 0.25  # seconds between looks
HELD = LeaseRow(held=True, holder="one", beat=1, node="10.0.0.1:4011")
FREE = HELD._replace(held=False)
RELEASED = FREE._replace(holder="")


def watched(
    row: Callable[[float], LeaseRow | None],
    until: float,
    watch: LeaseWatch | None = None,
) -> tuple[float, LeaseVerdict]:
    """Return the first verdict but WAIT, and when; or WAIT at the end."""
    watch = watch or LeaseWatch()
    now = 0.0
    while now < until:
        verdict = watch.on_look(row(now), now)
        if verdict is not LeaseVerdict.WAIT:
            return now, verdict
        now += EVERY
    return now, LeaseVerdict.WAIT


def beating(now: float) -> LeaseRow:
    return HELD._replace(beat=int(2 * now))


def test_nobody_takes_over_from_a_holder_that_runs() -> None:
    assert watched(beating, 1000.0)[1] is LeaseVerdict.WAIT


def test_what_was_given_up_is_taken_at_once() -> None:
    assert watched(lambda now: RELEASED, 1.0) == (0.0, LeaseVerdict.TAKE_OVER)


def test_a_lost_session_is_waited_for() -> None:
    """It may be there again in a moment."""
    at, verdict = watched(lambda now: beating(now) if now < 5.0 else FREE, 20.0)

    assert verdict is LeaseVerdict.TAKE_OVER
    assert at - 5.0 == FREE_FOR
    brief = watched(lambda now: beating(now) if now % 2 >= EVERY else FREE, 100.0)
    assert brief[1] is LeaseVerdict.WAIT


def test_a_holder_of_this_machine_that_has_ended_is_not_waited_for() -> None:
    at, verdict = watched(lambda now: FREE, 1.0, LeaseWatch(at_once=True))

    assert (at, verdict) == (0.0, LeaseVerdict.TAKE_OVER)
    # But if another had it meanwhile, it is that one's.
    at, _ = watched(
        lambda now: beating(now) if now < 1.0 else FREE, 9.0, LeaseWatch(at_once=True)
    )
    assert at == 1.0 + FREE_FOR


def test_the_session_of_a_silent_holder_is_ended() -> None:
    at, verdict = watched(lambda now: beating(min(now, 5.0)), 20.0)

    assert verdict is LeaseVerdict.END_HOLDER
    assert at == 5.0 + SILENT_MAX
    # A coordinator that is no node never shows that it runs.
    alone = HELD._replace(node="")
    assert watched(lambda now: alone, 100.0)[1] is LeaseVerdict.WAIT


def test_after_the_database_was_away_the_holder_gets_time_to_find_it() -> None:
    def row(now: float) -> LeaseRow | None:
        return None if 5.0 <= now < 65.0 else FREE if now >= 65.0 else beating(now)

    at, verdict = watched(row, 100.0)

    assert verdict is LeaseVerdict.TAKE_OVER
    assert at - 65.0 >= SILENT_MAX - EVERY


def test_a_pause_of_its_own_gives_it_no_advantage() -> None:
    """Whoever was stopped for a while does not know what the others did."""
    watch = LeaseWatch()
    for now in (0.0, EVERY):
        assert watch.on_look(HELD, now) is LeaseVerdict.WAIT
    assert watch.on_look(HELD, EVERY + 60.0) is LeaseVerdict.WAIT
    assert watch.on_look(FREE, 2 * EVERY + 60.0) is LeaseVerdict.WAIT


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beats", "silent", "free", "away"]),
            st.floats(0.01, 2 * LOOK_MAX),
        ),
        max_size=60,
    )
)
def test_it_ends_no_holder_that_it_has_not_watched(
    looks: list[tuple[str, float]],
) -> None:
    """Each verdict rests on looks that succeeded, for long enough."""
    watch, now, beat = LeaseWatch(), 0.0, 0
    good_since: float | None = None
    free_since: float | None = None
    shown_since = 0.0
    for kind, pause in looks:
        now += pause
        beat += kind == "beats"
        row = None if kind == "away" else HELD._replace(held=kind != "free", beat=beat)
        verdict = watch.on_look(row, now)
        if row is None:
            good_since = free_since = None
        elif good_since is None or pause > LOOK_MAX:
            good_since, free_since, shown_since = now, None, now
        if kind == "beats":
            shown_since = now
        if kind == "free":
            free_since = now if free_since is None else free_since
        else:
            free_since = None
        match verdict:
            case LeaseVerdict.TAKE_OVER:
                assert free_since is not None
                assert now - free_since >= FREE_FOR
            case LeaseVerdict.END_HOLDER:
                assert now - shown_since >= SILENT_MAX
                assert good_since is not None
                shown_since = now
            case LeaseVerdict.WAIT:
                pass
