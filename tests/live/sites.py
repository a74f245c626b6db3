"""Network namespaces, and the programs in them."""

from contextlib import ExitStack
from pathlib import Path

from live.machines import Machine
from live.programs import (
    TINY,
    TOKEN,
    GatedModel,
    Pool,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."


class Site:
    """A machine, and the programs on it."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.programs = Programs(folder / machine.name)

    def serve(self, *flags: str) -> Pool:
        with self.machine.inside():
            return self.programs.serve("--name", self.machine.name, *flags)

    def join(self, *flags: str) -> Program:
        with self.machine.inside():
            return self.programs.run("join", *flags, "--json", "--token", TOKEN)

    def models(self, pool: Pool) -> set[str]:
        """Return the models of a coordinator here, as clients see them."""
        with self.machine.inside(), pool.client() as client:
            return {model.id for model in client.models.list()}

    def protections(self, pool: Pool) -> set[str]:
        """Return the protections of the workers' connections to a local coordinator."""
        with self.machine.inside():
            return {worker["protection"] for worker in pool.workers()}

    def ask(self, pool: Pool, question: str, model: str) -> str:
        with (
            self.machine.inside(),
            pool.client() as client,
            answer_to(client, question, model) as stream,
        ):
            return "".join(text_in(stream))


def with_model(place: Site, pool: Pool, model: str) -> Program:
    """Add a worker to a coordinator of its own machine."""
    worker = place.join(pool.url, "--name", "here", "--model", f"{model}={TINY}")
    worker.event("joined")
    return worker


def check_takeover(one: Site, here: Pool, other: Site, there: Pool) -> None:
    """Kill the other site's coordinator during an answer of it.

    A worker of the first place has to finish it without a gap.
    """
    with ExitStack() as finally_:
        with other.machine.inside():
            slow = GatedModel(pause=5)
        finally_.callback(slow.close)
        other.join(there.url, "--name", "slow", *slow.flags).event("joined")
        eventually(lambda: "tiny" in one.models(here), "the other's model is here")

        with (
            one.machine.inside(),
            here.client() as client,
            answer_to(client, STORY) as stream,
        ):
            pieces = text_in(stream)
            first = next(pieces)
            with_model(one, here, "tiny")
            there.program.kill()

            assert first + "".join(pieces) == ANSWERS[STORY]
