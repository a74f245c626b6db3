"""Machines of their own, and what runs there."""

from pathlib import Path

from live.machines import Machine
from live.programs import TINY, TOKEN, Pool, Program, Programs, answer_to, text_in


class Place:
    """A machine, and what runs there."""

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
        """Return who else can read what the workers of a coordinator here are told."""
        with self.machine.inside():
            return {worker["protection"] for worker in pool.workers()}

    def ask(self, pool: Pool, question: str, model: str) -> str:
        with (
            self.machine.inside(),
            pool.client() as client,
            answer_to(client, question, model) as stream,
        ):
            return "".join(text_in(stream))


def with_model(place: Place, pool: Pool, model: str) -> Program:
    """Add a worker to a coordinator of its own machine."""
    worker = place.join(pool.url, "--name", "here", "--model", f"{model}={TINY}")
    worker.said("joined")
    return worker
