"""Show a model that fits on no machine, on this machine: `make demo-giant`.

Starts a coordinator and three workers with too little memory for a model each, which
lend it to each other.  A chat has the model split over two of them; the one that holds
a part of it is killed in the middle of an answer, which ends whole with the third.
"""

import sys

from demo_parts import Clock, DemoPool, demo_pool, eventually

from shoal.cli.local.demo import DemoError

RUNNER, LENDERS = "otter", ("beaver", "heron")
MODEL = "giant"
MEMORY_MB = 90  # of each machine: the model needs more than 100
CONTEXT = 512
QUESTION = "Tell a long story about a fish that goes to the moon."
KILL_AFTER = 8  # pieces of the answer


def start(pool: DemoPool, programs: str) -> None:
    """Start the workers; ``programs`` is llama.cpp's folder."""
    pool.add_file(RUNNER)
    options = ["--load", "local", "--memory", f"{MEMORY_MB}MB", "--slots", "1"]
    options += ["--context", str(CONTEXT), "--llama-cpp", programs]
    pool.join(RUNNER, f": {MEMORY_MB} MB, has the model's file", *options)
    for name in LENDERS:
        about = f": {MEMORY_MB} MB, lends its memory"
        pool.join(name, about, *options, "--lend-memory", f"{MEMORY_MB}MB")


def parts(pool: DemoPool) -> dict[str, int]:
    """Return the machines that run the model, with their layers."""
    return {
        part["name"]: part["layers"]
        for replica in pool.replicas()
        if replica["state"] == "loaded"
        for part in replica["parts"]
    }


def say_parts(pool: DemoPool, clock: Clock) -> dict[str, int]:
    """Print which machines run the model, and return them."""
    found = parts(pool)
    if len(found) < 2:
        raise DemoError(f"{MODEL} is on {found}, expected two machines")
    shown = " and ".join(f"{count} on {name}" for name, count in found.items())
    clock.say(f"its layers: {shown}")
    return found


def main() -> int:
    with demo_pool(MODEL) as (pool, clock):
        start(pool, sys.argv[1])
        clock.say(f"a chat asks for {MODEL}, which fits on none of them")
        answer = pool.ask(QUESTION)
        eventually(lambda: answer.pieces >= KILL_AFTER, "the answer begins")
        (lost,) = say_parts(pool, clock).keys() - {RUNNER}
        pool.kill(lost, ", and its part of the model")
        pool.finish(answer)
        if lost in say_parts(pool, clock):
            raise DemoError(f"{lost} is still said to hold a part")
    return 0


if __name__ == "__main__":
    sys.exit(main())
