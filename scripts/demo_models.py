"""Show models that are loaded on demand, on this machine: `make demo-models`.

Starts a coordinator and three workers, of which one has the file of a model, and none
has it loaded.  A chat has it loaded there; a second machine copies it from the first;
the first is killed in the middle of an answer, which ends whole.
"""

import sys

from demo_parts import Clock, DemoPool, demo_pool, eventually

from shoal.cli.local.demo import DemoError

FIRST, SECOND, THIRD = "otter", "beaver", "heron"
MODEL = "storyteller"
QUESTIONS = (
    "Why is the sea salty?  Explain it to a child.",
    "How do birds find their way?  Explain it to a child.",
)
KILL_AFTER = 8  # pieces of each answer


def start(pool: DemoPool) -> None:
    """Start the workers, of which the first has a file of the model."""
    pool.add_file(FIRST)
    for name in (FIRST, SECOND, THIRD):
        has = ", with the file of a model" if name == FIRST else ", with none"
        pool.join(name, has, "--load", "pull", "--slots", "2", "--memory", "2GB")


def states(pool: DemoPool) -> dict[str, str]:
    """Return the machines that have the model by order, with their states."""
    return {each["name"]: each["state"] for each in pool.replicas()}


def load_for_a_chat(pool: DemoPool, clock: Clock) -> None:
    """Ask for the model, which is loaded nowhere."""
    if states(pool):
        raise DemoError(f"{MODEL} is loaded already")
    clock.say(f"a chat asks for {MODEL}, which is loaded nowhere")
    answer = pool.ask(QUESTIONS[0])
    eventually(lambda: bool(states(pool)), "the model is being loaded")
    eventually(lambda: answer.pieces > 0, "the answer begins")
    if (found := states(pool)) != {FIRST: "loaded"}:
        raise DemoError(f"{MODEL} is on {found}, expected {FIRST}")
    clock.say(f"{MODEL} is loaded on {FIRST}")
    pool.finish(answer)


def deploy(pool: DemoPool, clock: Clock) -> None:
    """Have the model on a second machine, which has no file of it."""
    wanted = {"replicas": 2, "on": [FIRST, SECOND]}
    pool.api.request(f"/admin/deployments/{MODEL}", wanted, method="PUT")
    clock.say(f"shoal models deploy {MODEL} --replicas 2 --on {FIRST},{SECOND}")
    both = {FIRST: "loaded", SECOND: "loaded"}
    eventually(lambda: states(pool) == both, f"{SECOND} has the model")
    copy = pool.file(SECOND).with_suffix("")  # a folder
    copied = sum(each.stat().st_size for each in copy.iterdir() if each.is_file())
    if copied != pool.file(FIRST).stat().st_size:
        raise DemoError(f"{SECOND} has {copied} bytes of the model")
    clock.say(
        f"{SECOND} copied {copied / 1e6:.0f} MB from {FIRST}, and loaded the model"
    )


def lose_the_first(pool: DemoPool, clock: Clock) -> None:
    """Kill the machine that the model came from, while both answer."""
    answers = [pool.ask(each) for each in QUESTIONS]
    eventually(
        lambda: all(each.pieces >= KILL_AFTER for each in answers),
        "both answers have begun",
    )
    clock.say("two answers stream, one from each machine")
    pool.kill(FIRST)
    pool.finish(*answers)


def main() -> int:
    with demo_pool(MODEL) as (pool, clock):
        start(pool)
        load_for_a_chat(pool, clock)
        deploy(pool, clock)
        lose_the_first(pool, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
