"""``shoal``: the command line's entry point.

``shoal --help`` reads only the table below; the module of a command, with its imports,
is loaded when the command runs.
"""

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal import __version__

COMMANDS = {
    "serve": "run a coordinator",
    "join": "offer this machine's models and functions to a coordinator",
    "throttle": "pause this machine's workers, or lend part of their speed",
    "chat": "chat with a model of the pool",
    "keys": "create, list and revoke API keys",
    "tokens": "create, list and revoke join tokens of workers",
    "fleet": "pair machines into a fleet, by a URL or QR code",
    "models": "copy models from peers, and list local ones",
    "jobs": "submit, list, explain and cancel jobs",
    "quote": "show the price of a job",
    "pair": "pair workers with users, for private jobs",
    "train": "run a script on several machines, as torchrun does on one",
    "tasks": "list and call the functions of workers",
    "accounts": "show accounts, and credit them",
    "receipts": "list, export and verify receipts",
    "workers": "pause, resume, drain and remove workers",
    "db": "check, back up and compact a coordinator's database",
    "status": "show a pool's workers and jobs",
    "demo": "demonstrate failover of a worker, on this machine",
    "version": "print the version",
}

EXIT_USAGE = 2
EXIT_STORE_BROKEN = 74  # EX_IOERR of sysexits.h: a restart alone does not help
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name; return the exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    if name in COMMANDS:
        return _run(name, rest)
    print(f"shoal: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
    return EXIT_USAGE


def _run(name: str, arguments: list[str]) -> int:
    with _quiet_interrupt():
        from argparse import ArgumentParser

        from shoal.cli.terminal import printable
        from shoal.domain.errors import ShoalError, StoreBroken, StoreError

        with _uncollected():
            module = importlib.import_module(f"shoal.cli.{name}")
            parser = ArgumentParser(f"shoal {name}", description=module.__doc__)
            module.add_arguments(parser)
    try:
        status: int = module.run(parser.parse_args(arguments))
    except StoreError as error:
        print(f"shoal {name}: {printable(error.located)}", file=sys.stderr)
        return EXIT_STORE_BROKEN if isinstance(error, StoreBroken) else 1
    except ShoalError as error:
        print(f"shoal {name}: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe; Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once while modules are imported.

    A library that is half imported may mistake KeyboardInterrupt for another error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage cycles while modules are imported, nor among them later.

    They are permanent, and searching them takes a sixth of the time of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    return (
        "usage: shoal COMMAND ...\n\n"
        "Turns the machines you have into one AI computer.\n\n"
        f"{commands}\n\n"
        "shoal COMMAND --help describes a command.  To begin: shoal serve"
    )
