"""What a demo prints, and how it fails."""

import contextlib
from collections.abc import Iterator

from shoal.cli.terminal import console, printable
from shoal.domain.errors import ShoalError


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
