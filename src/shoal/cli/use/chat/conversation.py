"""A conversation at the terminal, and its commands."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cli.use.chat.answer import chat_models
from shoal.client.coordinator import CoordinatorApi
from shoal.config.private_files import write_private
from shoal.domain.errors import ConfigError, NotFound


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
        raise NotFound(f"no model {argument!r} that chats; those of the pool: {known}")
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
    "/model": SlashCommand("[NAME]", "list the models, or change it", _model),
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
