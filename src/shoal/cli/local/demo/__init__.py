"""``shoal demo``: failover of a worker and a verified receipt, all on this machine."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.command_loop import Program, run_program
from shoal.cli.terminal import console, printable
from shoal.client.coordinator import CoordinatorApi
from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError, ShoalError
from shoal.domain.money import dollars
from shoal.domain.work import JobKind
from shoal.engines.gguf_files import DEMO_MODEL
from shoal.ledger import bundle, receipts
from shoal.ledger.receipts import Claims
from shoal.protocols import discover

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.completion_usage import CompletionUsage

WORKERS = ("otter", "beaver")
THIRD = "heron"
QUESTION = "Why is the sea salty?  Explain it to a child."
ANSWER_MAX = 160  # tokens
KILL_AFTER = 25  # pieces of the answer
WAIT = 60  # seconds for the job to complete


class DemoError(ShoalError):
    """A part of the demo failed."""


def say(text: str, style: str = "", end: str = "\n") -> None:
    """Print a text at once: in a style of rich's on a terminal, elsewhere plain."""
    from rich.text import Text

    shown = Text(printable(text), style=style)
    console().print(shown, end=end, soft_wrap=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Show what is being done within the block: on a terminal, only for so long."""
    terminal = console()
    if not terminal.is_interactive:
        say(f"{text} …")
        yield
        return
    with terminal.status(f"[dim]{text} …"):
        yield


class ReceiptNotProved(ShoalError):
    """The job failed, or its receipt is invalid."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """An answer that two workers gave, one of which was killed meanwhile."""

    job: str
    text: str
    tokens: int
    killed: str


@click.command("demo")
@click.option(
    "--question", default=QUESTION, show_default=True, help="Prompt of the chat."
)
@click.option(
    "--model",
    metavar="NAME=PATH",
    default=DEMO_MODEL,
    help="Model to use, with its GGUF file.  Default: the demo's.",
)
def command(question: str, model: str) -> None:
    """Demonstrate failover of a worker and a verified receipt, all on this machine.

    A coordinator and its workers are started in a temporary folder; one of them is
    killed while it answers.  Nothing remains.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            f"the demo needs the OpenAI client: {install_extra('demo')}"
        ) from error
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        coordinator = stack.enter_context(_coordinator(folder))
        url, key = coordinator.report["url"], coordinator.report["api_key"]
        join = ["join", url, "--token", "demo", "--engine", "embedded"]
        join += ["--model", model, "--load", "none"]
        workers = {
            name: stack.enter_context(_worker(name, join, folder)) for name in WORKERS
        }
        api = CoordinatorApi(url, key, folder)
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        )
        say(f"\n{question}\n", "bold")
        answer = _ask(client, workers, question)
        say("the coordinator's record of the job:", "dim")
        for line in api.request(f"/admin/jobs/{answer.job}/explain")["lines"]:
            say(f"  {line}", "dim")
        say(
            f"\nThe answer is complete: {answer.tokens} tokens of {ANSWER_MAX} at "
            f"most, begun by {answer.killed}, finished by the other worker.\n",
            "green",
        )
        signing = ["--wire", _signing_wire()]
        stack.enter_context(_worker(THIRD, [*join, *signing], folder))
        _run_job_with_receipt(api, answer.text)
        say("The receipt is valid; verification needed only the public key.", "green")


@contextmanager
def _coordinator(folder: Path) -> Iterator[Program]:
    serve = ["serve", "--port", "0", "--data-dir", str(folder / "data")]
    serve += ["--price-cheap-task", "0.001"]  # else the receipt is of a free job
    with ExitStack() as stack:
        with step("starting a coordinator"):
            started = run_program(
                "coordinator", [*serve, "--join-token", "demo"], folder
            )
            program = stack.enter_context(started)
        say(f"a coordinator serves {program.report['url']}", "dim")
        yield program


@contextmanager
def _worker(name: str, join: Sequence[str], folder: Path) -> Iterator[Program]:
    """Run a worker within the block, with a temporary key."""
    identity = ["--name", name, "--identity", str(folder / f"{name}.json")]
    with ExitStack() as stack:
        with step(f"starting the worker {name}"):
            program = stack.enter_context(run_program(name, [*join, *identity], folder))
        signs = ", and signs receipts for its jobs" if name == THIRD else ""
        say(f"{name} joined with {program.report['model']}{signs}", "dim")
        yield program


def _ask(client: "OpenAI", workers: Mapping[str, Program], question: str) -> DemoAnswer:
    """Ask a question, and kill the worker that answers after a few words."""
    response = client.chat.completions.with_raw_response.create(
        model=workers[WORKERS[0]].report["model"],
        messages=[{"role": "user", "content": question}],
        max_tokens=ANSWER_MAX,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    answering = _name_in(response.headers["x-shoal-worker"])
    killed, job, text = "", "", ""
    usage: CompletionUsage | None = None
    for number, chunk in enumerate(response.parse()):
        job, usage = chunk.id, chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            say(choice.delta.content or "", end="")
        if number == KILL_AFTER:
            killed = answering
            workers[killed].process.kill()
            say(f"⟨{killed} was killed here⟩", "red", end="")
    say("\n")
    if not killed:
        raise DemoError(
            "the answer ended before a worker could be killed: use a --question with a "
            "longer answer"
        )
    assert usage is not None, "the request includes it"
    return DemoAnswer(job, text, usage.completion_tokens, killed)


def _name_in(worker: str) -> str:
    """Return the name of a worker of the demo, by its id in the pool."""
    for name in WORKERS:
        if name in worker:
            return name
    raise DemoError(f"an unknown worker answers: {worker}")


def _signing_wire() -> str:
    """Return the wire, not Shoal's own, whose workers sign receipts."""
    return next(
        name
        for name, wire in discover().items()
        if wire.has_keys and JobKind.TASK in wire.kinds and not wire.preferred
    )


def _run_job_with_receipt(api: CoordinatorApi, text: str) -> None:
    """Summarize a text, and verify the receipt with the public key alone.

    Raises ReceiptNotProved, ShoalError.
    """
    task = {"task_type": "summarize", "input": text}
    submission = {"job_type": "TASK", "payload": task, "user_id": "demo"}
    with step(f"{THIRD} summarizes the answer"):
        job_id = api.request("/v1/jobs/commit/cheap", submission)["job_id"]
        job = api.request(f"/v1/jobs/{job_id}?wait={WAIT}")
    if job["status"] != "completed":
        raise ReceiptNotProved(f"the task is {job['status']}: {job['result']}")
    say(f"  summarize → {json.dumps(job['result'], ensure_ascii=False)}", "dim")
    public_key = bytes.fromhex(api.request("/v1/log")["public_key"])
    file = api.fetch(f"/v1/receipts/{job_id}")
    # Verification is offline.
    for check in bundle.verify(file, public_key):
        say(f"  {'ok' if check.ok else 'FAILED'}  {check.step.value}", "dim")
        if not check.ok:
            raise ReceiptNotProved(f"the receipt is invalid: {check.problem}")
    claims = receipts.read(bundle.read(file).receipt.encode()).claims
    say(f"  {claims.verdict.value}; it earned {_earned(claims)}", "dim")


def _earned(claims: Claims) -> str:
    return f"{dollars(claims.price - claims.fee)} of {dollars(claims.price)}"
