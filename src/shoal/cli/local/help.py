"""``shoal help``: describes a command, as its ``--help`` does."""

import click


@click.command("help")
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
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
