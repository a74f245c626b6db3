"""``shoal``: finds the command and runs it.

The table below is all that ``shoal --help`` needs, so that it answers at once: a
command's module, with everything it imports, is loaded only to run it.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal import __version__

COMMANDS = {
    "serve": "run a coordinator: one endpoint for everything that joins it",
    "join": "offer this machine's model to a coordinator",
    "chat": "talk to a pool",
    "keys": "make, list and revoke API keys",
    "tokens": "make, list and revoke what workers join by",
    "fleet": "let machines into a fleet, by a URL that they can scan",
    "models": "copy models from peers, and list those that are here",
    "jobs": "list jobs, explain why one went as it did, and cancel",
    "tasks": "list the functions that workers have, and call them",
    "accounts": "show what jobs cost whom, and top accounts up",
    "receipts": "list and export receipts, and verify them offline",
    "status": "show a pool's workers and jobs",
    "demo": "see a pool survive the loss of a worker, on this machine",
    "version": "print the version",
}

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 and SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    if name in COMMANDS:
        return _run(name, rest)
    print(f"shoal: there is no command {name!r}\n\n{_usage()}", file=sys.stderr)
    return EXIT_USAGE


def _run(name: str, arguments: list[str]) -> int:
    with _ends_quietly():
        from argparse import ArgumentParser

        from shoal.cli.terminal import printable
        from shoal.domain.errors import ShoalError

        module = importlib.import_module(f"shoal.cli.{name}")
    parser = ArgumentParser(f"shoal {name}", description=module.__doc__)
    try:
        module.add_arguments(parser)
        status: int = module.run(parser.parse_args(arguments))
    except ShoalError as error:
        print(f"shoal {name}: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read has what it wanted; Python would complain again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while modules are imported.

    Raised there, what stands for it may be taken for another error by a library that
    is only half imported.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # who calls us so has the signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    return (
        "usage: shoal COMMAND ...\n\n"
        "Turns the machines you have into one AI computer.\n\n"
        f"{commands}\n\n"
        "shoal COMMAND --help tells more.  To begin: shoal serve"
    )
