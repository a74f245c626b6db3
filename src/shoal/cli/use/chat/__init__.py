"""``shoal chat``: chat with a model of the pool, once or in a conversation."""

import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import json_option, pass_api
from shoal.cli.terminal import printable
from shoal.cli.use.chat.answer import ChatStream, first_chat_model
from shoal.cli.use.chat.conversation import Conversation, run_command
from shoal.cli.use.chat.display import AnswerDisplay
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.errors import ConfigError, ShoalError

if TYPE_CHECKING:
    from shoal.cli.use.chat.question_prompt import QuestionPrompt


@click.command("chat")
@click.argument("prompt", nargs=-1)
@click.option("--model", help="Name of the model.  Default: the first that chats.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("--max-tokens", type=int, metavar="N", help="Limit of the answer.")
@click.option("--temperature", type=float, metavar="T", help="Sampling temperature.")
@click.option(
    "--no-history",
    is_flag=True,
    help="Keep the questions of a conversation in memory alone.",
)
@json_option
@pass_api
def command(
    api: CoordinatorApi,
    prompt: tuple[str, ...],
    model: str | None,
    system: str,
    no_history: bool,
    as_json: bool,
    **options: object,
) -> None:
    """Chat with a model of the pool.

    With a PROMPT, or text on standard input, it answers once.  The word `-` in the
    PROMPT is replaced by standard input.  Otherwise a conversation begins: /help lists
    its commands, Ctrl-C or Escape ends an answer, and Ctrl-D the conversation.
    """
    given = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(model or first_chat_model(api), system, given)
    if as_json:
        _print_json(api, conversation, prompt)
    else:
        chat(api, conversation, prompt, keep_history=not no_history)


def _print_json(
    api: CoordinatorApi, conversation: Conversation, prompt: Sequence[str]
) -> None:
    """Answer a prompt as one JSON object.  Raises ShoalError."""
    conversation.messages.append(_message("user", _read_prompt(prompt)))
    stream = _request(api, conversation)
    for _ in stream.parts():
        pass
    answer = stream.answer
    told = {
        "model": conversation.model,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "tokens": answer.tokens,
        "tokens_per_second": answer.tokens_per_second,
        "worker": answer.worker,
    }
    click.echo(json.dumps(told))


def chat(
    api: CoordinatorApi,
    conversation: Conversation,
    prompt: Sequence[str],
    *,
    keep_history: bool = True,
) -> None:
    """Answer a prompt, or questions at the terminal until its user ends that.

    Raises ShoalError.
    """
    display = AnswerDisplay()
    if prompt or not sys.stdin.isatty():
        conversation.messages.append(_message("user", _read_prompt(prompt)))
        display.show(_request(api, conversation), conversation.model)
        return
    from shoal.cli.use.chat.question_prompt import QuestionPrompt

    display.note(
        f"Talking to {conversation.model}.  /help lists the commands; Ctrl-D ends it."
    )
    questions = QuestionPrompt(_folder(api), keep=keep_history)
    while (question := questions.read()) is not None:
        try:
            if question.startswith("/"):
                display.note(run_command(question, conversation, api))
            else:
                _ask(api, conversation, display, questions, question)
        except ShoalError as error:
            display.end_line()
            print(f"shoal chat: {printable(str(error))}", file=sys.stderr)


def _ask(
    api: CoordinatorApi,
    conversation: Conversation,
    display: AnswerDisplay,
    questions: "QuestionPrompt",
    question: str,
) -> None:
    """Print the answer to a question; without one, the question is dropped."""
    messages = conversation.messages
    messages.append(_message("user", question))
    stream = _request(api, conversation)
    try:
        with questions.interrupted_by_escape():
            display.show(stream, conversation.model)
    except KeyboardInterrupt:
        display.note("stopped")
    except ShoalError:
        messages.pop()
        raise
    if stream.answer.text:
        messages.append(_message("assistant", stream.answer.text))
    else:
        messages.pop()


def _request(api: CoordinatorApi, conversation: Conversation) -> ChatStream:
    key = f"chat-{secrets.token_hex(16)}"
    return ChatStream(api, conversation.body(), key, time.monotonic, time.sleep)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _folder(api: CoordinatorApi) -> Path:
    return api.data_dir.expanduser()


def _read_prompt(parts: Sequence[str]) -> str:
    """Return the prompt from the command line, or else from standard input.

    Beside a prompt, standard input is read only for a dash: the parent process may
    never close it.
    """
    words = parts or ("-",)
    prompt = " ".join(sys.stdin.read() if part == "-" else part for part in words)
    if not prompt.strip():
        raise ConfigError(
            'the prompt is empty; for example: shoal chat "Why is the sky blue?"'
        )
    return prompt
