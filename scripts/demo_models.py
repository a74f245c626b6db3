"""Show models that are loaded on demand, on this machine: `make demo-models`.

Starts a coordinator and three workers, of which one has the file of a model, and none
has it loaded.  A chat has it loaded there; a second machine copies it from the first;
the first is killed in the middle of an answer, which ends whole.
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

FIRST, SECOND, THIRD = "otter", "beaver", "heron"
MODEL = "storyteller"
TOKEN, KEY = "demo-of-models", "sk-demo-of-models"
QUESTIONS = (
    "Why is the sea salty?  Explain it to a child.",
    "How do birds find their way?  Explain it to a child.",
)
KILL_AFTER = 8  # pieces of each answer


class Pond:
    """The programs of the demonstration."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._workers: dict[str, Program] = {}

    def start(self, stack: ExitStack) -> None:
        """Start all programs, which end with ``stack``."""
        serve = ["serve", "--port", "0", "--data-dir", str(self._folder / "pool")]
        serve += ["--join-token", TOKEN, "--api-key", KEY, "--no-discovery"]
        coordinator = stack.enter_context(run_program("pool", serve, self._folder))
        url = coordinator.report["url"]
        self._clock.say(f"the coordinator serves {url}")
        self.file(FIRST).parent.mkdir(parents=True)
        shutil.copy(demo_model_path(), self.file(FIRST))
        for name in (FIRST, SECOND, THIRD):
            join = ["join", url, "--token", TOKEN, "--name", name, "--load", "pull"]
            join += ["--data-dir", str(self._folder / name), "--slots", "2"]
            join += ["--memory", "2"]
            worker = stack.enter_context(run_program(name, join, self._folder))
            self._workers[name] = worker
            has = "with the file of a model" if name == FIRST else "with none"
            self._clock.say(f"the worker {name} joined, {has}")
        self._api = CoordinatorApi(url, KEY, self._folder)
        self._client = stack.enter_context(
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        )

    def file(self, name: str) -> Path:
        """Return where a worker has the model."""
        models = self._folder / name / "models"
        return models / (f"{MODEL}.gguf" if name == FIRST else MODEL)

    def replicas(self) -> dict[str, str]:
        """Return the machines that have the model by order, with their states."""
        listed: list[dict[str, Any]] = self._api.request("/admin/models")["data"]
        found = [each["replicas"] for each in listed if each["id"] == MODEL]
        return {each["name"]: each["state"] for places in found for each in places}

    def ask(self, question: str) -> Answer:
        return Answer(self._client, MODEL, "the pool", question)

    def finish(self, *answers: Answer) -> None:
        """Wait until answers have ended, whole."""
        for each in answers:
            each.wait()
            self._clock.say(
                f"an answer is whole: {each.tokens} tokens, the longest pause "
                f"{each.longest_pause:.1f} s",
                "green",
            )

    def load_for_a_chat(self) -> None:
        """Ask for the model, which is loaded nowhere."""
        if self.replicas():
            raise DemoError(f"{MODEL} is loaded already")
        self._clock.say(f"a chat asks for {MODEL}, which is loaded nowhere")
        answer = self.ask(QUESTIONS[0])
        eventually(lambda: bool(self.replicas()), "the model is being loaded")
        eventually(lambda: answer.pieces > 0, "the answer begins")
        self._clock.say(f"{MODEL} is loaded on {self._loaded_on(FIRST)}")
        self.finish(answer)

    def deploy(self) -> None:
        """Have the model on a second machine, which has no file of it."""
        wanted = {"replicas": 2, "on": [FIRST, SECOND]}
        self._api.request(f"/admin/deployments/{MODEL}", wanted, method="PUT")
        self._clock.say(f"shoal models deploy {MODEL} --replicas 2 --on otter,beaver")
        both = {FIRST: "loaded", SECOND: "loaded"}
        eventually(lambda: self.replicas() == both, f"{SECOND} has the model")
        copied = sum(
            each.stat().st_size
            for each in self.file(SECOND).iterdir()
            if each.is_file()
        )
        if copied != self.file(FIRST).stat().st_size:
            raise DemoError(f"{SECOND} has {copied} bytes of the model")
        self._clock.say(
            f"{SECOND} copied {copied / 1e6:.0f} MB from {FIRST}, and loaded the model"
        )

    def lose_the_first(self) -> None:
        """Kill the machine that the model came from, while both answer."""
        answers = [self.ask(each) for each in QUESTIONS]
        eventually(
            lambda: all(each.pieces >= KILL_AFTER for each in answers),
            "both answers have begun",
        )
        self._clock.say("two answers stream, one from each machine")
        first = psutil.Process(self._workers[FIRST].process.pid)
        first.suspend()  # it starts no other
        for each in (*first.children(recursive=True), first):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._clock.say(f"⟨{FIRST} was killed⟩", "red")
        self.finish(*answers)

    def _loaded_on(self, name: str) -> str:
        found = self.replicas()
        if found != {name: "loaded"}:
            raise DemoError(f"{MODEL} is on {found}, expected {name}")
        return name


def main() -> int:
    clock = Clock()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        pond = Pond(folder, clock)
        pond.start(stack)
        pond.load_for_a_chat()
        pond.deploy()
        pond.lose_the_first()
        clock.say("No answer was lost, and nothing came from the internet.", "green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
