"""Demonstrate failover of a worker and a verified receipt, all on this machine."""

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from shoal.cli import api
from shoal.cli.demo.programs import (
    BOLD,
    DIM,
    GREEN,
    PLAIN,
    RED,
    DemoError,
    print_coloured,
    run_program,
)
from shoal.domain.errors import ConfigError, ShoalError
from shoal.domain.money import dollars
from shoal.engines.gguf_files import DEMO_MODEL
from shoal.ledger import bundle, receipts
from shoal.ledger.receipts import Claims
from shoal.protocols import discover

WAIT = 60  # seconds for the job to complete


class ReceiptNotProved(ShoalError):
    """The job failed, or its receipt is invalid."""


def run_job_with_receipt(
    api_args: argparse.Namespace, text: str, print_line: Callable[[str], None]
) -> None:
    """Summarize a text, and verify the receipt with the public key alone.

    Raises ReceiptNotProved, ApiError.
    """
    task = {"task_type": "summarize", "input": text}
    submission = {"job_type": "TASK", "payload": task, "user_id": "demo"}
    job_id = api.request(api_args, "/v1/jobs/commit/cheap", submission)["job_id"]
    job = api.request(api_args, f"/v1/jobs/{job_id}?wait={WAIT}")
    if job["status"] != "completed":
        raise ReceiptNotProved(f"the task is {job['status']}: {job['result']}")
    print_line(f"  summarize → {json.dumps(job['result'], ensure_ascii=False)}")
    public_key = bytes.fromhex(api.request(api_args, "/v1/log")["public_key"])
    file = api.fetch(api_args, f"/v1/receipts/{job_id}")
    # Verification is offline.
    for check in bundle.verify(file, public_key):
        print_line(f"  {'ok' if check.ok else 'FAILED'}  {check.step.value}")
        if not check.ok:
            raise ReceiptNotProved(f"the receipt is invalid: {check.problem}")
    claims = receipts.read(bundle.read(file).receipt.encode()).claims
    print_line(f"  {claims.verdict.value}; it earned {_earned(claims)}")


def _earned(claims: Claims) -> str:
    return f"{dollars(claims.price - claims.fee)} of {dollars(claims.price)}"


WORKERS = ("otter", "beaver")
THIRD = "heron"
QUESTION = "Why is the sea salty?  Explain it to a child."
ANSWER_MAX = 160  # tokens
KILL_AFTER = 25  # pieces of the answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--question", default=QUESTION, help="prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME=PATH",
        help="model to use, with its GGUF file (default: the demo's)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            "the demo needs OpenAI's client: pip install 'shoal[demo]'"
        ) from error
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        print_coloured(f"{DIM}starting a coordinator and two workers …{PLAIN}")
        serve = ["serve", "--port", "0", "--data-dir", str(folder / "data")]
        coordinator = stack.enter_context(
            run_program("coordinator", [*serve, "--join-token", "demo"], folder)
        )
        url, key = coordinator.report["url"], coordinator.report["api_key"]
        join = ["join", url, "--token", "demo", "--engine", "embedded"]
        join += ["--model", args.model or DEMO_MODEL]
        workers = {}
        for name in WORKERS:
            program = run_program(name, [*join, *_identity_flags(name, folder)], folder)
            workers[name] = stack.enter_context(program)
            print_coloured(
                f"{DIM}{name} joined with {workers[name].report['model']}{PLAIN}"
            )
        model = workers[WORKERS[0]].report["model"]
        print_coloured(f"\n{BOLD}{args.question}{PLAIN}\n")
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        )
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": args.question}],
            max_tokens=ANSWER_MAX,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        api_args = argparse.Namespace(url=url, api_key=key)
        killed, usage, job, text = "", None, "", ""
        for number, chunk in enumerate(stream):
            job, usage = chunk.id, chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                print(choice.delta.content or "", end="", flush=True)
            if number == KILL_AFTER:
                killed = _busy_worker(api_args)
                workers[killed].process.kill()
                print_coloured(f"{RED}⟨{killed} was killed here⟩{PLAIN}", end="")
        print("\n")
        if not killed:
            raise DemoError(
                "the answer ended before a worker could be killed: use a --question "
                "with a longer answer"
            )
        print_coloured(f"{DIM}the coordinator's record of the job:{PLAIN}")
        for line in api.request(api_args, f"/admin/jobs/{job}/explain")["lines"]:
            print_coloured(f"{DIM}  {line}{PLAIN}")
        assert usage is not None, "the request includes it"
        print_coloured(
            f"\n{GREEN}The answer is complete: {usage.completion_tokens} tokens, "
            f"begun by {killed}, finished by the other worker.{PLAIN}"
        )
        signing = next(
            name
            for name, wire in discover().items()
            if wire.signs and not wire.preferred
        )
        third = [*join, *_identity_flags(THIRD, folder), "--wire", signing]
        with run_program(THIRD, third, folder):
            _show_receipt(api_args, text)
    return 0


def _show_receipt(api_args: argparse.Namespace, text: str) -> None:
    print_coloured(f"\n{DIM}{THIRD} joined, and signs receipts for its jobs{PLAIN}")
    run_job_with_receipt(
        api_args, text, lambda line: print_coloured(f"{DIM}{line}{PLAIN}")
    )
    print_coloured(
        f"{GREEN}The receipt is valid; verification needed only the public key.{PLAIN}"
    )


def _identity_flags(name: str, folder: Path) -> list[str]:
    """Return the flags for a worker's name and a temporary key."""
    return ["--name", name, "--identity", str(folder / f"{name}.json")]


def _busy_worker(api_args: argparse.Namespace) -> str:
    """Return the name of the worker that is answering."""
    for worker in api.request(api_args, "/admin/status")["workers"]:
        if worker["busy"]:
            for name in WORKERS:
                if name in worker["id"]:
                    return name
    raise DemoError("no worker is answering")
