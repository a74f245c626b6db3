"""Feeds one parser, or all of them, with bad input for a long time.

From the folder ``tests``: ``python -m fuzz NAME --seconds 600 --seed 1``.
"""

import argparse
import gc
import resource
import sys
from contextlib import suppress
from random import Random
from time import perf_counter, process_time

from fuzz.mutations import mutated
from fuzz.parsers import PARSERS, Parser
from shoal.domain.errors import PeerError

SLOW = 0.1  # seconds of the processor for one input
LOOK_EVERY = 256  # inputs between looks at the clock


def run(name: str, parser: Parser, seconds: float, seed: int) -> bool:
    """Try a parser; return whether it took everything as it should."""
    random, seeds = Random(f"{name}{seed}"), parser.seeds()
    inputs = refused = 0
    slowest, worst = 0.0, b""
    gc.collect()
    objects = len(gc.get_objects())
    end = perf_counter() + seconds
    while inputs % LOOK_EVERY or perf_counter() < end:
        data = mutated(random, seeds)
        inputs += 1
        before = process_time()
        try:
            parser.parse(data)
        except PeerError:
            refused += 1
        except Exception as error:
            print(f"{name}: {data!r}\n{type(error).__name__}: {error}", flush=True)
            raise
        took = process_time() - before
        if took > SLOW:  # perhaps Python was tidying up
            before = process_time()
            with suppress(PeerError):
                parser.parse(data)
            took = min(took, process_time() - before)
        if took > slowest:
            slowest, worst = took, data
    gc.collect()
    grown = len(gc.get_objects()) - objects
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{name:12} inputs={inputs} refused={refused} slowest_ms={slowest * 1e3:.1f} "
        f"objects={grown:+d} most_mib={memory}",
        flush=True,
    )
    if slowest > SLOW:
        print(f"{name}: slow: {worst[:2000]!r}", flush=True)
    return slowest <= SLOW


def main() -> int:
    """Run what the command line names; return 1 if something was slow."""
    arguments = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    arguments.add_argument("name", nargs="*", choices=[*PARSERS, []], default=[])
    arguments.add_argument("--seconds", type=float, default=60.0, help="for each")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    names = given.name or [*PARSERS]
    results = [run(each, PARSERS[each], given.seconds, given.seed) for each in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
