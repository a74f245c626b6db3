"""Reads questions at the terminal, with editing, history and completion."""

import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from shoal.cli.use.chat import COMMANDS
from shoal.config.private_files import create_private, make_private_folder
from shoal.domain.errors import ConfigError

HISTORY = "chat-history"  # in the data folder
END = "/exit"
ESCAPE = b"\x1b"
_OTHER_KEYS = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O?[^\x1b])")  # begin with it, too
READ_MAX = 1024  # bytes


class QuestionPrompt:
    """The prompt of a conversation; the questions are kept for the next one."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=_history(folder) if keep else InMemoryHistory(),
            completer=WordCompleter([*COMMANDS, END], sentence=True),
            complete_while_typing=False,
        )
        self._typed = b""  # while an answer was written

    def read(self) -> str | None:
        """Return the next question, or None at the end; Ctrl-C discards the line."""
        while True:
            typed, self._typed = self._typed.decode(errors="ignore"), b""
            begun = "".join(each for each in typed if each.isprintable())
            try:
                question = self._session.prompt(default=begun).strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None
            if question:
                return None if question == END else question

    @contextmanager
    def interrupted_by_escape(self) -> Iterator[None]:
        """Raise KeyboardInterrupt within if Escape is pressed; not on Windows.

        What is typed meanwhile begins the next question.
        """
        if sys.platform == "win32":
            yield
            return
        import termios
        import tty

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        ended, end = os.pipe()
        reading = threading.Thread(target=self._read_keys, args=(terminal, ended))
        try:
            tty.setcbreak(terminal)
            reading.start()
            yield
        finally:
            os.close(end)
            reading.join()
            os.close(ended)
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    def _read_keys(self, terminal: int, ended: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while ended not in select.select([terminal, ended], [], [])[0]:
            keys = os.read(terminal, READ_MAX)
            if not keys:
                return  # the terminal is gone
            keys = _OTHER_KEYS.sub(b"", keys)
            self._typed += keys.replace(ESCAPE, b"")
            if ESCAPE in keys and sys.platform != "win32":
                signal.pthread_kill(main, signal.SIGINT)


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
