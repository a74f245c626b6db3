"""Reads questions at the terminal, with editing, history and completion."""

from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from shoal.cli.use.chat.conversation import COMMANDS
from shoal.config.private_files import create_private, make_private_folder
from shoal.domain.errors import ConfigError

HISTORY = "chat-history"  # in the data folder
END = "/exit"


class QuestionPrompt:
    """The prompt of a conversation; the questions are kept for the next one."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=_history(folder) if keep else InMemoryHistory(),
            completer=WordCompleter([*COMMANDS, END], sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str | None:
        """Return the next question, or None at the end; Ctrl-C discards the line."""
        while True:
            try:
                question = self._session.prompt().strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None
            if question:
                return None if question == END else question


def _history(folder: Path) -> History:
    """Return the history in a file that only its owner can read."""
    file = folder / HISTORY
    try:
        if not folder.exists():
            make_private_folder(folder)
        create_private(file)
    except (OSError, ConfigError):
        return InMemoryHistory()  # as on a full or foreign disk
    return FileHistory(file)
