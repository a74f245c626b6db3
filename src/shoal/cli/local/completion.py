"""``shoal completion``: what a shell needs to complete this command line."""

import click
from click.shell_completion import get_completion_class

from shoal.cli.main import COMPLETION

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   shoal completion bash > ~/.local/share/bash-completion/completions/shoal
    zsh    shoal completion zsh > "${fpath[1]}/_shoal"
    fish   shoal completion fish > ~/.config/fish/completions/shoal.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None, "click has these shells"
    root = ctx.find_root()
    click.echo(completion(root.command, {}, "shoal", COMPLETION).source())
