"""Chat with a model of the pool: one question, or a conversation."""

import argparse
import sys
from contextlib import suppress
from typing import Any

from shoal.cli import api
from shoal.cli.terminal import printable
from shoal.domain.errors import ConfigError

END = "/exit"
REASONS = {
    "length": "truncated at the token limit",
    "content_filter": "blocked by moderation",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="*",
        help="question, - for standard input; without it, an interactive conversation",
    )
    parser.add_argument(
        "--model", help="name of the model (default: the first of the pool)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="limit of the answer"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature"
    )
    api.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    model = args.model or _first_model(args)
    messages: list[dict[str, str]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    if args.prompt or not sys.stdin.isatty():
        messages.append({"role": "user", "content": _read_prompt(args.prompt)})
        _send(args, model, messages)
        return 0
    print(f"Talking to {printable(model)}.  {END} or Ctrl-D ends it.", file=sys.stderr)
    _enable_editing()
    while (question := _read_question()) is not None:
        messages.append({"role": "user", "content": question})
        try:
            answer = _send(args, model, messages)
        except api.ApiError as error:
            # Drop the question, keep the conversation.
            messages.pop()
            print(f"shoal chat: {printable(str(error))}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _read_prompt(parts: list[str]) -> str:
    """Return the prompt from the command line, or else from standard input.

    The word ``-`` is replaced by standard input.  Beside a prompt, standard input is
    read only for that: the parent process may never close it.
    """
    parts = parts or ["-"]
    prompt = " ".join(sys.stdin.read() if part == "-" else part for part in parts)
    if not prompt.strip():
        raise ConfigError(
            'the prompt is empty; for example: shoal chat "Why is the sky blue?"'
        )
    return prompt


def _enable_editing() -> None:
    with suppress(ImportError):  # Windows' terminal has editing of its own
        import readline  # noqa: F401  # changes what input() does


def _read_question() -> str | None:
    """Return the next question, or None at the end.

    Skips empty lines: pasted text may contain some, and ending there would send the
    rest of it to the shell.
    """
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return None
        if question:
            return None if question == END else question


def _first_model(args: argparse.Namespace) -> str:
    models = api.request(args, "/v1/models")["data"]
    if not models:
        raise api.ApiError(
            "the pool has no models: on any machine, run the `shoal join` command that "
            "`shoal serve` printed"
        )
    return str(models[0]["id"])


def _send(args: argparse.Namespace, model: str, messages: list[dict[str, str]]) -> str:
    """Print the answer as it streams; return it."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if args.max_tokens is not None:
        body["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        body["temperature"] = args.temperature
    terminal = sys.stdout.isatty()
    pieces = []
    reason = None
    try:
        for event in api.stream_events(args, "/v1/chat/completions", body):
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                pieces.append(piece)
                print(printable(piece) if terminal else piece, end="", flush=True)
    finally:
        if pieces:
            print()
    if reason in REASONS:
        print(f"({REASONS[reason]})", file=sys.stderr)
    return "".join(pieces)
