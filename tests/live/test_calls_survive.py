"""The promises of ``docs/promises.md`` on calls, with real processes killed."""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent import futures
from functools import partial
from pathlib import Path

import pytest

import shoal
from harness.speed import scaled
from live.programs import KEY, PATIENCE, TESTS, Program, Programs, eventually

CALLS = 2000
HELD = 50  # of them end after all kills
LONG = "join-me-please"
FLAGS = ("--join-token", LONG)
FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
CODE = ("--trust-code", "--slots", "2")
WORKERS = ("one", "two", "three")
WITHIN = scaled(120.0)  # seconds until all calls have ended


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)


def marked(
    folder: str, number: int, seconds: float = 0.0, go_on: str | None = None
) -> int:
    """Leave a file that says that a call with ``number`` began, and when.

    ``go_on`` is a file without which it does not end.
    """
    Path(folder, f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(seconds)
    while go_on and not Path(go_on).exists():
        time.sleep(0.01)
    return number * number


def asking(folder: str, number: int, go_on: str) -> int:
    """Make a call of its own, once it may go on."""
    with shoal.Pool() as pool:
        marked(folder, number, 0.0, go_on)
        return pool.submit(marked, folder, number + 100).result(PATIENCE)


def begun(folder: Path) -> dict[int, list[int]]:
    """Return when calls began, in nanoseconds since 1970, by their numbers."""
    times: defaultdict[int, list[int]] = defaultdict(list)
    for file in folder.iterdir():
        times[int(file.name.partition("-")[0])].append(file.stat().st_mtime_ns)
    return times


class Site:
    """A coordinator and workers, which are killed and started again."""

    def __init__(self, programs: Programs, workers: Sequence[str] = WORKERS) -> None:
        self.pool = programs.serve(*FLAGS, *FLEET)
        self._programs = programs
        self._workers: dict[str, Program] = {}
        for name in workers:
            self.enlist(name)

    def enlist(self, name: str) -> None:
        self._workers[name] = self.pool.join(name, *CODE, token=LONG)

    def kill_worker(self, name: str) -> None:
        self._workers[name].kill()
        self.enlist(name)

    def kill_coordinator(self) -> None:
        self.pool.program.kill()
        self.start_coordinator()

    def start_coordinator(self) -> None:
        ports = self.pool.ready["ports"]
        self.pool = self._programs.serve(
            *FLAGS,
            *("--macfleet-heartbeat-port", str(ports["macfleet_heartbeat"])),
            *("--macfleet-transport-port", str(ports["macfleet_transport"])),
            port=self.pool.port,
        )


def note_end(ended: dict[int, int], number: int, call: futures.Future[int]) -> None:
    """Note when the end of a call was told, in nanoseconds since 1970."""
    ended[number] = time.time_ns()


def wait_for(calls: Sequence[futures.Future[int]], enough: int) -> None:
    """Wait until a number of calls have ended."""

    def done() -> int:
        return sum(call.done() for call in calls)

    eventually(lambda: done() >= enough, f"{enough} calls", WITHIN)


def test_no_call_is_lost_in_any_kill(programs: Programs, tmp_path: Path) -> None:
    site = Site(programs)
    folder, go_on = tmp_path / "marks", tmp_path / "go on"
    folder.mkdir()
    ended: dict[int, int] = {}

    with shoal.Pool(site.pool.url, KEY) as pool:
        calls: list[futures.Future[int]] = []
        for number in range(CALLS):
            named = pool.with_options(key=f"survivor {number}")
            # The last ones leave something to lose to each kill.
            held = str(go_on) if number >= CALLS - HELD else None
            call = named.submit(marked, str(folder), number, 0.005, held)
            call.add_done_callback(partial(note_end, ended, number))
            calls.append(call)
        for share, kill in (
            (0.1, partial(site.kill_worker, "one")),
            (0.3, site.kill_coordinator),
            (0.5, partial(site.kill_worker, "two")),
            (0.7, site.kill_coordinator),
            (0.8, partial(site.kill_worker, "three")),
        ):
            wait_for(calls, int(share * CALLS))
            kill()
        go_on.touch()
        futures.wait(calls, WITHIN)

        assert [call.result(0) for call in calls] == [n * n for n in range(CALLS)]

    runs = begun(folder)
    assert runs.keys() == set(range(CALLS))
    late = [n for n, times in runs.items() if max(times) > ended[n]]
    assert late == [], "made again after their ends were told"
    # Only what was under way when somebody was killed is made again.
    again = Counter({n: len(times) - 1 for n, times in runs.items()})
    assert again.total() < CALLS / 10


def test_calls_are_made_while_a_coordinator_stops_and_starts(
    programs: Programs, tmp_path: Path
) -> None:
    site = Site(programs, WORKERS[:1])
    folder, go_on = tmp_path / "marks", tmp_path / "go on"
    folder.mkdir()

    with shoal.Pool(site.pool.url, KEY) as pool:
        running = pool.submit(marked, str(folder), 0, 0.0, str(go_on))
        eventually(lambda: begun(folder), "it has begun")
        site.pool.program.process.terminate()
        eventually(lambda: "stopping" in site.pool.program.errors, "it is stopping")
        calls = [pool.submit(marked, str(folder), number) for number in range(1, 9)]
        go_on.touch()
        assert site.pool.program.wait() == 0
        site.start_coordinator()

        assert [call.result(WITHIN) for call in calls] == [n * n for n in range(1, 9)]
        assert running.result(WITHIN) == 0

    runs = {number: len(times) for number, times in begun(folder).items()}
    assert runs == dict.fromkeys(range(9), 1)


def test_calls_that_run_while_the_coordinator_is_killed_run_once(
    programs: Programs, tmp_path: Path
) -> None:
    """Also such as make calls of their own."""
    site = Site(programs)
    folder, go_on = tmp_path / "marks", tmp_path / "go on"
    folder.mkdir()
    with shoal.Pool(site.pool.url, KEY) as pool:
        numbers = range(2 * len(WORKERS))
        squares = pool.map(
            marked, [str(folder)] * 5, numbers, [0.0] * 5, [str(go_on)] * 5
        )
        nested = pool.submit(asking, str(folder), 5, str(go_on))
        eventually(lambda: len(begun(folder)) == len(numbers), "all have begun")
        for _ in range(2):
            # Their leases are in the store.
            eventually(lambda: leased(site) == len(numbers), "workers have them")
            site.kill_coordinator()
        eventually(lambda: leased(site) == len(numbers), "their workers came back")
        go_on.touch()

        assert [*squares] == [n * n for n in range(5)]
        assert nested.result(PATIENCE) == 105 * 105

    runs = {number: len(times) for number, times in begun(folder).items()}
    assert runs == dict.fromkeys([*numbers, 105], 1)


def leased(site: Site) -> int:
    """Return how many calls are at workers."""
    listed = site.pool.admin("jobs?state=leased")["data"]
    return sum(job["kind"] == "call" for job in listed)


def test_ended_calls_are_not_repeated_by_another_coordinator(
    programs: Programs, tmp_path: Path
) -> None:
    site = Site(programs)
    folder = tmp_path / "marks"
    folder.mkdir()
    for _ in range(2):
        with shoal.Pool(site.pool.url, KEY) as pool:
            named = pool.with_options(key="tonight")
            squares = named.map(marked, [str(folder)] * 20, range(20))
            assert list(squares) == [n * n for n in range(20)]
        site.kill_coordinator()

    runs = {number: len(times) for number, times in begun(folder).items()}
    assert runs == dict.fromkeys(range(20), 1)


def test_volatile_calls_fail_with_their_coordinator(
    programs: Programs, tmp_path: Path
) -> None:
    site = Site(programs, WORKERS[:1])
    folder = tmp_path / "marks"
    folder.mkdir()
    with shoal.Pool(site.pool.url, KEY, durable=False) as pool:
        calls = [pool.submit(marked, str(folder), n, 60.0) for n in range(20)]
        eventually(lambda: begun(folder), "one of them has begun")

        site.kill_coordinator()

        for call in calls:
            with pytest.raises(ConnectionError, match="may or may not have run"):
                call.result(PATIENCE)
        assert pool.submit(marked, str(folder), 99).result(PATIENCE) == 99 * 99
