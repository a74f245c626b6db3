"""``shoal db``: check, back up and compact a coordinator's database."""

import json
from pathlib import Path

import click

from shoal.cli.options import data_dir_option, json_option
from shoal.store.file_folder import FILES_FOLDER
from shoal.store.sqlite import maintenance

DATABASE = "shoal.db"


@click.group("db")
def command() -> None:
    """Check, back up and compact a coordinator's database, on its machine."""


@command.command("check")
@data_dir_option
@json_option
def check(data_dir: Path, as_json: bool) -> int:
    """Look for damage in the database, also while it is in use."""
    path = _database(data_dir)
    problems = maintenance.check(path)
    if as_json:
        click.echo(json.dumps({"database": str(path), "problems": [*problems]}))
        return 1 if problems else 0
    for each in problems:
        click.echo(f"{path}: {each}", err=True)
    if not problems:
        click.echo(f"{path}: no damage found")
    return 1 if problems else 0


@command.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@data_dir_option
@json_option
def back_up(file: Path, data_dir: Path, as_json: bool) -> None:
    """Copy the database to a file, also while it is in use.

    FILE is the file to write; it must not exist.
    """
    path = _database(data_dir)
    maintenance.back_up(path, file)
    files = path.with_name(FILES_FOLDER)
    left_out = str(files) if any(files.glob("*")) else None
    if as_json:
        click.echo(json.dumps({"backup": str(file), "left_out": left_out}))
        return
    click.echo(f"wrote {file}")
    if left_out is not None:
        click.echo(f"clients' files are not in it: copy {left_out} as well")


@command.command("compact")
@data_dir_option
@json_option
def compact(data_dir: Path, as_json: bool) -> None:
    """Rewrite the database without free space."""
    path = _database(data_dir)
    before, after = maintenance.compact(path)
    if as_json:
        click.echo(json.dumps({"bytes_before": before, "bytes_after": after}))
        return
    click.echo(f"{path}: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now")


def _database(data_dir: Path) -> Path:
    return data_dir.expanduser() / DATABASE
