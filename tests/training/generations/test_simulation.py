"""Runs in virtual time, whose ranks are killed, paused and cut off at any moment."""

from functools import partial
from random import Random

import pytest

from harness.profiles import some_long
from training.generations.simulated_run import SimulatedRun

SIZE = 4
OPERATIONS = 30
SEEDS = 25
SEEDS_OF_LONG = 300
SEEDS_OF_ALL = 3000  # with --every


def disturb(run: SimulatedRun, random: Random) -> None:
    """Let things happen to ranks and to the coordinator, but one rank is spared."""
    spared = random.choice([*run.ranks])
    for name, rank in run.ranks.items():
        network, at = run.network, random.uniform(1.0, 8.0)
        if name != spared and random.random() < 0.5:
            network.later(at, rank.kill)
        elif name != spared and random.random() < 0.5:
            network.later(at, partial(rank.pause, random.uniform(0.1, 8.0)))
        if random.random() < 0.3:
            network.later(random.uniform(1.0, 8.0), partial(run.disconnect, name))
    if random.random() < 0.4:
        run.network.later(random.uniform(1.0, 8.0), run.restart)


def check(seed: int) -> SimulatedRun:
    run = SimulatedRun(SIZE, OPERATIONS, Random(seed))
    disturb(run, Random(-seed))
    run.run()
    assert not run.rendezvous.over, seed
    for operation in range(OPERATIONS - 1):
        # A rank that is left behind may complete one operation alone, and no more.
        counted = {
            each.results[operation]
            for each in run.ranks.values()
            if len(each.results) > operation + 1
        }
        assert len(counted) <= 1, (seed, operation)
    return run


def test_an_undisturbed_run_is_one_generation() -> None:
    run = SimulatedRun(SIZE, OPERATIONS, Random(1))

    run.run()

    assert run.rendezvous.generation == 0
    assert len({tuple(each.results) for each in run.ranks.values()}) == 1


@pytest.mark.parametrize("seeds", some_long([SEEDS, SEEDS_OF_LONG], short=1))
def test_no_two_generations_go_on_and_all_results_are_the_same(
    request: pytest.FixtureRequest, seeds: int
) -> None:
    if request.config.getoption("every"):
        seeds = SEEDS_OF_ALL
    ends, generations = 0, 0

    for seed in range(1, seeds + 1):
        run = check(seed)
        generations += run.rendezvous.generation
        ends += any(len(each.results) == OPERATIONS for each in run.ranks.values())

    assert ends > 0.9 * seeds
    assert generations > seeds / 2
