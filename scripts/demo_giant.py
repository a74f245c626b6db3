"""Show a model that fits on no machine, on this machine: `make demo-giant`.

Starts a coordinator and three workers with too little memory for a model each, which
lend it to each other.  A chat has the model split over two of them; the one that holds
a part of it is killed in the middle of an answer, which ends whole with the third.
"""

import shutil
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
from demo_parts import Answer, Clock, eventually

from shoal.cli.command_loop import Program, run_program
from shoal.cli.local.demo import DemoError
from shoal.client.coordinator import CoordinatorApi
from shoal.engines.gguf_files import demo_model_path

RUNNER, LENDERS = "otter", ("beaver", "heron")
MODEL = "giant"
TOKEN, KEY = "demo-of-giant", "sk-demo-of-giant"
MEMORY_MB = 90  # of each machine: the model needs more than 100
CONTEXT = 512
QUESTION = "Tell a long story about a fish that goes to the moon."
KILL_AFTER = 8  # pieces of the answer


class Shoal:
    """The programs of the demonstration; ``programs`` is llama.cpp's folder."""

    def __init__(self, folder: Path, programs: Path, clock: Clock) -> None:
        self._folder = folder
        self._programs = programs
        self._clock = clock
        self._workers: dict[str, Program] = {}

    def start(self, stack: ExitStack) -> None:
        """Start all programs, which end with ``stack``."""
        serve = ["serve", "--port", "0", "--data-dir", str(self._folder / "pool")]
        serve += ["--join-token", TOKEN, "--api-key", KEY, "--no-discovery"]
        coordinator = stack.enter_context(run_program("pool", serve, self._folder))
        self.url = coordinator.report["url"]
        self._clock.say(f"the coordinator serves {self.url}")
        model = self._folder / RUNNER / "models" / f"{MODEL}.gguf"
        model.parent.mkdir(parents=True)
        shutil.copy(demo_model_path(), model)
        for name in (RUNNER, *LENDERS):
            join = ["join", self.url, "--token", TOKEN, "--name", name]
            join += ["--data-dir", str(self._folder / name), "--load", "local"]
            join += ["--memory", str(MEMORY_MB / 1000), "--context", str(CONTEXT)]
            join += ["--slots", "1", "--llama-cpp", str(self._programs)]
            if name != RUNNER:
                join += ["--lend-memory", f"{MEMORY_MB}MB"]
            self._workers[name] = stack.enter_context(
                run_program(name, join, self._folder)
            )
            does = "has the model's file" if name == RUNNER else "lends its memory"
            self._clock.say(f"the worker {name} joined: {MEMORY_MB} MB, {does}")
        self._api = CoordinatorApi(self.url, KEY, self._folder)
        self._client = stack.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)
        )

    def parts(self) -> dict[str, int]:
        """Return the machines that run the model, with their layers."""
        listed: list[dict[str, Any]] = self._api.request("/admin/models")["data"]
        found = [each["replicas"] for each in listed if each["id"] == MODEL]
        return {
            part["name"]: part["layers"]
            for places in found
            for replica in places
            if replica["state"] == "loaded"
            for part in replica["parts"]
        }

    def answer(self) -> Answer:
        """Ask for the model, which is loaded nowhere, and wait until it answers."""
        self._clock.say(f"a chat asks for {MODEL}, which fits on none of them")
        answer = Answer(self._client, MODEL, "the pool", QUESTION)
        eventually(lambda: answer.pieces >= KILL_AFTER, "the answer begins")
        self._say_parts()
        return answer

    def lose_a_part(self, answer: Answer) -> None:
        """Kill the machine that holds a part, while the model answers."""
        (lost,) = self.parts().keys() - {RUNNER}
        worker = psutil.Process(self._workers[lost].process.pid)
        worker.suspend()  # it starts no other
        for each in (*worker.children(recursive=True), worker):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._clock.say(f"⟨{lost} was killed, and its part of the model⟩", "red")
        answer.wait()
        self._clock.say(
            f"the answer is whole: {answer.tokens} tokens, the longest pause "
            f"{answer.longest_pause:.1f} s",
            "green",
        )
        if lost in self.parts():
            raise DemoError(f"{lost} is still said to hold a part")
        self._say_parts()

    def _say_parts(self) -> None:
        found = self.parts()
        if len(found) < 2:
            raise DemoError(f"{MODEL} is on {found}, expected two machines")
        shown = " and ".join(f"{count} on {name}" for name, count in found.items())
        self._clock.say(f"its layers: {shown}")


def main() -> int:
    clock = Clock()
    programs = Path(sys.argv[1])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        shoal = Shoal(folder, programs, clock)
        shoal.start(stack)
        shoal.lose_a_part(shoal.answer())
        clock.say("No answer was lost, and nothing came from the internet.", "green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
