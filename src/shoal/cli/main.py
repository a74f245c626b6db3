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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import click
from click.shell_completion import CompletionItem

from shoal import __version__
from shoal.domain.errors import ShoalError, StoreBroken, StoreError

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "pool": {
        "serve": "run a coordinator",
        "join": "offer this machine's models and functions to a coordinator",
        "join-line": "print the command that adds a machine",
        "service": "run serve or join in the background, from login on",
        "dashboard": "open the pool's dashboard in the browser, signed in",
        "status": "show a pool's workers and jobs",
        "nodes": "list, approve, pause, drain and remove machines",
        "throttle": "pause this machine's workers, or lend part of their speed",
    },
    "use": {
        "run": "chat with a model; start whatever is needed",
        "chat": "chat with a model of the pool",
        "models": "download models, copy them from other machines, and list them",
        "jobs": "submit, list, explain and cancel jobs",
        "tasks": "list and call the functions of workers",
        "train": "run a script on several machines, as torchrun does on one",
        "quote": "show the price of a job",
    },
    "access": {
        "keys": "create, list and revoke API keys",
        "tokens": "create, list and revoke join tokens of workers",
        "fleet": "pair machines into a fleet, by a URL or QR code",
        "pair": "pair workers with users, for private jobs",
        "accounts": "show accounts, and credit them",
        "receipts": "list, export and verify receipts",
    },
    "local": {
        "doctor": "check this machine and its coordinator",
        "config": "show the settings in effect, and where files are",
        "db": "check, back up, restore and compact a coordinator's database",
        "demo": "demonstrate failover of a worker, on this machine",
        "completion": "print the completion script of a shell",
        "help": "describe a command",
        "version": "print the version",
    },
}
"""What each command does, by its section, which is a folder here, and its name."""

HEADINGS = {
    "pool": "Run a pool",
    "use": "Use it",
    "access": "Access and accounts",
    "local": "This program",
}

WITHIN = {
    "join-line": "shoal.cli.pool.invitations:join_line",
    "dashboard": "shoal.cli.pool.invitations:dashboard",
    "quote": "shoal.cli.use.jobs:quote_command",
    "keys": "shoal.cli.access.credentials:keys",
    "tokens": "shoal.cli.access.credentials:tokens",
    "pair": "shoal.cli.access.credentials:pair",
    "completion": "shoal.cli.local.program:completion",
    "help": "shoal.cli.local.program:help_",
    "version": "shoal.cli.local.program:version",
}
"""The commands that share a module with others."""

PLACES = {
    name: WITHIN.get(name, f"shoal.cli.{section}.{name.replace('-', '_')}:command")
    for section, commands in SECTIONS.items()
    for name in commands
}
"""The module of each command, and its name there."""

EXIT_STORE_BROKEN = 74  # EX_IOERR of sysexits.h: a restart alone does not help
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

COMPLETION = "_SHOAL_COMPLETE"  # variable by which a shell asks for completions


HELP = """\
Shoal joins the computers you already have into one pool for AI work: chats,
embeddings, Python functions and training.

Programs use the pool through one OpenAI-compatible endpoint.
"""


class LazyGroup(click.Group):
    """The commands of ``SECTIONS``, each imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PLACES:
            return None
        with _quiet_interrupt(), _uncollected():
            module, _, attribute = PLACES[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in PLACES and not args[0].startswith("-"):
            raise click.NoSuchCommand(args[0], possibilities=PLACES, ctx=ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem]:
        # From the table: else each command that begins so would be imported.
        named = [
            CompletionItem(name, help=does)
            for commands in SECTIONS.values()
            for name, does in commands.items()
            if name.startswith(incomplete)
        ]
        return named or super().shell_complete(ctx, incomplete)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        width = max(map(len, PLACES))
        for section, commands in SECTIONS.items():
            with formatter.section(HEADINGS[section]):
                formatter.write_dl(
                    [(name.ljust(width), does) for name, does in commands.items()]
                )


shoal = LazyGroup(
    "shoal",
    help=HELP,
    epilog="To start a pool: shoal serve.  `shoal COMMAND --help` describes a command.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
shoal = click.version_option(
    __version__, "-V", "--version", message="shoal %(version)s"
)(shoal)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name; return the exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETION in os.environ:
        shoal.main(argv, "shoal", complete_var=COMPLETION)
    try:
        # Shells expand patterns; others, such as those of --model, are not for files.
        status: int | None = shoal.main(
            argv, "shoal", standalone_mode=False, windows_expand_args=False
        )
    except click.ClickException as error:
        return _report_usage(error)
    except click.Abort:
        return EXIT_INTERRUPTED
    except StoreError as error:
        _report(argv[0], error.located)
        return EXIT_STORE_BROKEN if isinstance(error, StoreBroken) else 1
    except ShoalError as error:
        _report(argv[0], str(error))
        return 1
    return status or 0


def _report_usage(error: click.ClickException) -> int:
    """Report what is wrong with the arguments, in the form of all other errors."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        if context is None or context.parent is None:  # `shoal` alone asks for help
            print(error.format_message())
            return 0
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    path = context.command_path if context is not None else "shoal"
    print(f"{path}: {error.format_message()}", file=sys.stderr)
    if context is not None:
        print(f"`{path} --help` shows usage", file=sys.stderr)
    return error.exit_code


def _report(name: str, error: str) -> None:
    from shoal.cli.terminal import printable

    print(f"shoal {name}: {printable(error)}", file=sys.stderr)


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
