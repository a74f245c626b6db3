"""``shoal completion``, ``help`` and ``version``: about the program itself."""

import importlib.metadata
import platform

import click
from click.shell_completion import get_completion_class

from shoal import __version__
from shoal.cli.main import COMPLETION
from shoal.cli.options import json_option
from shoal.cli.terminal import show

SHELLS = ("bash", "zsh", "fish")
PARTS = ("aiohttp", "msgspec", "uvloop", "xllamacpp")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   shoal completion bash > ~/.local/share/bash-completion/completions/shoal
    zsh    shoal completion zsh > "${fpath[1]}/_shoal"
    fish   shoal completion fish > ~/.config/fish/completions/shoal.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click has these shells"
    root = ctx.find_root()
    click.echo(found(root.command, {}, "shoal", COMPLETION).source())


@click.command("help")
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Describe a command, such as `keys create`; without one, list all."""
    described = ctx.find_root()
    for word in words:
        group = described.command
        found = None
        if isinstance(group, click.Group):
            _, found, _ = group.resolve_command(described, [word])
        if found is None:
            raise click.UsageError(
                f"{described.command_path} has no commands", described
            )
        described = click.Context(found, info_name=word, parent=described)
    click.echo(described.get_help())


@click.command("version")
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Shoal and its main dependencies."""
    versions = {"shoal": __version__, "python": platform.python_version()}
    for part in PARTS:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            versions[part] = "not installed"
    show(versions, as_json, *(f"{name} {each}" for name, each in versions.items()))
