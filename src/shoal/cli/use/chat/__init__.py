"""``shoal chat``: chat with a model of the pool, once or in a conversation."""

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import pass_api_with_json
from shoal.cli.terminal import printable
from shoal.cli.use.chat.answer import (
    AnswerDisplay,
    ChatStream,
    chat_models,
    first_chat_model,
)
from shoal.client.coordinator import CoordinatorApi
from shoal.config.private_files import write_private
from shoal.domain.errors import ConfigError, NotFound, ShoalError

if TYPE_CHECKING:
    from shoal.cli.use.chat.question_prompt import QuestionPrompt


@dataclass(slots=True)
class Conversation:
    """The messages so far, and how the next answer is asked for."""

    model: str
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the request of the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            **self.options,
        }

    def save(self, file: Path) -> None:
        """Write the conversation, for its owner alone: JSON for *.json, else Markdown.

        Raises ConfigError.
        """
        if file.suffix == ".json":
            text = json.dumps(self.body(), ensure_ascii=False, indent=2) + "\n"
        else:
            parts = [f"# Chat with {self.model}\n"]
            if self.system:
                parts.append(f"**system**\n\n{self.system}\n")
            for each in self.messages:
                parts.append(f"**{each['role']}**\n\n{each['content']}\n")
            text = "\n".join(parts)
        try:
            write_private(file, text)
        except OSError as error:
            raise ConfigError(f"/save {file}: {error.strerror}") from error


Reply = str
"""What a command prints."""


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command of the conversation."""

    parameter: str
    does: str
    run: Callable[[Conversation, str, CoordinatorApi], Reply]


def _help(conversation: Conversation, argument: str, api: CoordinatorApi) -> Reply:
    lines = [
        f"{f'{name} {each.parameter}'.rstrip():16} {each.does}"
        for name, each in COMMANDS.items()
    ]
    return "\n".join([*lines, f"{'/exit':16} end (also Ctrl-D)"])


def _clear(conversation: Conversation, argument: str, api: CoordinatorApi) -> Reply:
    conversation.messages.clear()
    return "a new conversation begins"


def _model(conversation: Conversation, argument: str, api: CoordinatorApi) -> Reply:
    models = chat_models(api)
    if not argument:
        return "\n".join(
            f"{'*' if each == conversation.model else ' '} {each}" for each in models
        )
    if argument not in models:
        known = ", ".join(models) or "none"
        raise NotFound(f"no chat model {argument!r}; the pool has: {known}")
    conversation.model = argument
    return f"talking to {argument}"


def _system(conversation: Conversation, argument: str, api: CoordinatorApi) -> Reply:
    if argument:
        conversation.system = "" if argument == "none" else argument
    return f"system prompt: {conversation.system or 'none'}"


def _save(conversation: Conversation, argument: str, api: CoordinatorApi) -> Reply:
    if not argument:
        raise ConfigError("/save: give a file, such as chat.md or chat.json")
    file = Path(argument).expanduser()
    conversation.save(file)
    return f"wrote {file}"


COMMANDS: Mapping[str, SlashCommand] = {
    "/help": SlashCommand("", "list the commands", _help),
    "/clear": SlashCommand("", "forget the conversation", _clear),
    "/model": SlashCommand("[NAME]", "list the models, or switch to one", _model),
    "/system": SlashCommand("[TEXT]", "show or set the system prompt; none", _system),
    "/save": SlashCommand("FILE", "write the conversation: .md or .json", _save),
}


def run_command(line: str, conversation: Conversation, api: CoordinatorApi) -> Reply:
    """Run a line that begins with a slash; return what to print.

    Raises ShoalError.
    """
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        raise ConfigError(f"no command {name}; /help lists them")
    return COMMANDS[name].run(conversation, argument.strip(), api)


@click.command("chat")
@click.argument("prompt", nargs=-1)
@click.option("--model", help="Name of the model.  Default: the first that can chat.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option(
    "--max-tokens", type=int, metavar="N", help="Limit of an answer, in tokens."
)
@click.option("--temperature", type=float, metavar="T", help="Sampling temperature.")
@click.option(
    "--no-history", is_flag=True, help="Do not save the questions of a conversation."
)
@pass_api_with_json
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

    With a PROMPT, or text on standard input, prints one answer.  `-` in the PROMPT
    stands for standard input.  Otherwise starts a conversation: /help lists its
    commands, Ctrl-C or Escape stops an answer, and Ctrl-D ends the conversation.
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
    shown = {
        "model": conversation.model,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "tokens": answer.tokens,
        "tokens_per_second": answer.tokens_per_second,
        "worker": answer.worker,
    }
    click.echo(json.dumps(shown))


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
            'the prompt is empty; give one, such as "Why is the sky blue?"'
        )
    return prompt
