"""Talk to a pool: one question, or a conversation."""

import argparse
import sys
from typing import Any

from shoal.cli import api


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", help="what to ask; without it, a conversation begins"
    )
    parser.add_argument("--model", help="(default: the first that the pool has)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T")
    api.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    model = args.model or _first_model(args)
    messages: list[dict[str, str]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    if args.prompt:
        messages.append({"role": "user", "content": " ".join(args.prompt)})
        _say(args, model, messages)
        return 0
    if not sys.stdin.isatty():
        messages.append({"role": "user", "content": sys.stdin.read()})
        _say(args, model, messages)
        return 0
    print(f"Talking to {model}.  An empty line ends it.", file=sys.stderr)
    while question := _question():
        messages.append({"role": "user", "content": question})
        try:
            answer = _say(args, model, messages)
        except api.ApiError as error:
            # The conversation so far is worth more than this question.
            messages.pop()
            print(f"shoal chat: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _question() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _first_model(args: argparse.Namespace) -> str:
    models = api.ask(args, "/v1/models")["data"]
    if not models:
        raise api.ApiError(
            "the pool has no model yet: run the `shoal join` line that `shoal serve` "
            "printed, on any machine"
        )
    return str(models[0]["id"])


def _say(args: argparse.Namespace, model: str, messages: list[dict[str, str]]) -> str:
    """Print the answer as it comes; return it."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if args.max_tokens is not None:
        body["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        body["temperature"] = args.temperature
    pieces = []
    for event in api.events(args, "/v1/chat/completions", body):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            pieces.append(piece)
            print(piece, end="", flush=True)
    print()
    return "".join(pieces)
