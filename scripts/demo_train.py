"""Show training across the pool, on this machine: `make demo-train`.

Starts a coordinator and three workers, trains a small language model on all three with
the ordinary script examples/train_language_model.py, kills the machine of rank 0 in
the middle, and chats with the trained model, whose file stays.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from shoal import launch
from shoal.cli.command_loop import Program, run_program
from shoal.cli.local.demo import DemoError, say, step
from shoal.cli.use.train.run_display import event_lines
from shoal.client.coordinator import CoordinatorApi
from shoal.training.run_events import Message

SCRIPT = Path(__file__).parents[1] / "examples" / "train_language_model.py"
WORKERS = ("otter", "beaver", "heron")
TOKEN = "demo-of-training"
MODEL = "small"
STEPS = 120
KILL_AT = 40  # the step
OUTPUT = Path("build/demo-train")
QUESTIONS = ("What is a shoal?", "What happens when a fish leaves?", "Who trained you?")
ANSWER_MAX = 60  # tokens, which are bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill-at", type=int, default=KILL_AT, help="0: kill none")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="for the model")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        data = folder / "data"
        os.environ["SHOAL_DATA_DIR"] = str(data)
        flags = ["--port", "0", "--data-dir", str(data), "--join-token", TOKEN]
        serve = ["serve", *flags, "--no-discovery"]
        with step("starting a coordinator"):
            coordinator = stack.enter_context(run_program("coordinator", serve, folder))
        url, key = coordinator.report["url"], coordinator.report["api_key"]
        join = ["join", url, "--token", TOKEN]
        workers = {}
        for name in WORKERS:
            flags = ["--trust-code", "--slots", "1", "--name", name]
            with step(f"starting the worker {name}"):
                program = run_program(name, [*join, *flags], folder)
                workers[name] = stack.enter_context(program)
            say(f"{name} joined", "dim")
        out = args.output
        shutil.rmtree(out / MODEL, ignore_errors=True)  # of an earlier demonstration
        api = CoordinatorApi(url, key, data)
        train(api, workers, out, args.steps, args.kill_at)
        model = out / MODEL / f"{MODEL}.gguf"
        shoal("models", "add", MODEL, str(out), "--bytes", "--to", str(out))
        chat(url, key, join, model, folder, stack)
        say(f"\nThe model stays in {model}.", "green")
    return 0


def train(
    api: CoordinatorApi,
    workers: dict[str, Program],
    out: Path,
    steps: int,
    kill_at: int,
) -> None:
    """Train on all workers, kill one of them at a step, and fetch the model."""
    say(f"\nshoal train --nodes 3 --min-nodes 2 {SCRIPT.name}\n", "bold")
    run = launch(
        SCRIPT,
        ["--steps", str(steps)],
        nodes=len(workers),
        min_nodes=2,
        environment={"OMP_NUM_THREADS": "1"},  # the three share one machine
        url=api.url,
        api_key=api.api_key,
    )
    try:
        killed = ""
        for event in run.events():
            if event is None:
                continue
            for line in event_lines(event):
                print(line, flush=True)
            if kill_at and not killed and step_of(event) >= kill_at:
                killed = worker_of(api, run.jobs[0], workers)
                workers[killed].process.send_signal(signal.SIGKILL)
                say(f"⟨{killed} was killed here⟩", "red")
        run.save_output(out)
    finally:
        run.close()
    say("\nthe coordinator's record of the run:", "dim")
    for line in api.request(f"/admin/jobs/{run.id}/explain")["lines"]:
        say(f"  {line}", "dim")
    lost = f" by those that {killed} left" if killed else ""
    say(f"\nThe model is trained{lost}.", "green")


def step_of(event: Message) -> float:
    """Return the step that an event reports; 0: none."""
    values = event.get("values")
    step = values.get("step") if isinstance(values, dict) else None
    return step if isinstance(step, (int, float)) else 0


def worker_of(api: CoordinatorApi, job: str, workers: dict[str, Program]) -> str:
    """Return the name of the worker that runs a job."""
    worker = str(api.request(f"/admin/jobs/{job}")["worker"])
    for name in workers:
        if name in worker:
            return name
    raise DemoError(f"the job runs on an unknown worker: {worker}")


def chat(
    url: str, key: str, join: list[str], model: Path, folder: Path, stack: ExitStack
) -> None:
    """Offer the trained model to the pool, and ask it."""
    named = f"{MODEL}={model.resolve()}"
    flags = ["--engine", "embedded", "--model", named, "--name", "chatter"]
    stack.enter_context(run_program("chatter", [*join, *flags], folder))
    for question in QUESTIONS:
        say(f"\nshoal chat {question!r}", "bold")
        flags = ["--url", url, "--api-key", key, "--temperature", "0"]
        shoal("chat", *flags, "--max-tokens", str(ANSWER_MAX), question)


def shoal(*arguments: str) -> None:
    """Run a command of Shoal to its end.  Raises DemoError if it fails."""
    command = [sys.executable, "-m", "shoal", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise DemoError(f"shoal {arguments[0]} failed")


if __name__ == "__main__":
    sys.exit(main())
