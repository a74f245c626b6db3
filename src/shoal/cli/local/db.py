"""``shoal db``: check, back up, restore, compact and copy a coordinator's database."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from shoal.app.database import EXAMPLE, store_at
from shoal.cli.options import data_dir_option, json_option
from shoal.cli.terminal import show
from shoal.config import store_url
from shoal.config.private_files import make_private_folder, write_private
from shoal.domain.errors import ConfigError, StoreError
from shoal.store.file_folder import FILES_FOLDER
from shoal.store.sqlite import maintenance
from shoal.store.sqlite.database import DATABASE

NEWEST_BACKUP = "newest-backup"
"""The file of a data folder that names the newest backup, for advice to restore it."""


@click.group("db")
def command() -> None:
    """Check, back up, restore, compact and copy a coordinator's database."""


store_option = click.option(
    "--store",
    default=store_url,
    show_default="store of the settings file, else the file in the data folder",
    envvar="SHOAL_STORE",
    show_envvar=True,
    metavar="URL",
    help="Database of a PostgreSQL server.",
)


@command.command("check")
@data_dir_option
@store_option
@json_option
def check(data_dir: Path, store: str, as_json: bool) -> int:
    """Check the database for damage, even while it is in use.

    Also checks that no receipt is missing that its key has signed.
    """
    path = data_dir.expanduser() / DATABASE
    if store:
        name = store_at(store, data_dir).name
        from shoal.store.postgres import maintenance as server  # late: with psycopg

        problems = server.check(store)
        read = partial(server.size_and_root, store)
    else:
        name = str(_database(data_dir))
        problems = maintenance.check(path)
        read = partial(maintenance.size_and_root, path)
    problems = problems or _log_problems(path.parent, read)
    found = [] if problems else [f"{name}: no damage found"]
    show({"database": name, "problems": [*problems]}, as_json, *found)
    for each in () if as_json else problems:
        click.echo(f"{name}: {each}", err=True)
    return 1 if problems else 0


@command.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@data_dir_option
@store_option
@json_option
def back_up(file: Path, data_dir: Path, store: str, as_json: bool) -> None:
    """Copy the database to a file, even while it is in use.

    FILE is the file to write; it must not exist.  PostgreSQL has pg_dump for this.
    """
    _check_file(store, f"pg_dump --format=custom --file={file} URL")
    path = _database(data_dir)
    maintenance.back_up(path, file)
    with suppress(OSError):  # on a read-only folder, the backup was made all the same
        write_private(path.with_name(NEWEST_BACKUP), f"{file.absolute()}\n")
    files = path.with_name(FILES_FOLDER)
    left_out = str(files) if any(files.glob("*")) else None
    lines = [f"wrote {file}"]
    if left_out is not None:
        lines.append(f"clients' files are not in the backup: copy {left_out} as well")
    show({"backup": str(file), "left_out": left_out}, as_json, *lines)


@command.command("restore")
@click.argument("file", type=click.Path(path_type=Path))
@data_dir_option
@store_option
@json_option
def restore(file: Path, data_dir: Path, store: str, as_json: bool) -> None:
    """Replace the database of a stopped coordinator with a backup.

    FILE is a file written by `shoal db backup`; it is kept.  The present database is
    renamed to shoal.old-1.db.  Later receipts are signed with a new key, because the
    present one may have signed receipts that are not in FILE.
    """
    from shoal.store.signing_keys import begin_new_log  # late: with cryptography

    _check_file(store, f"pg_restore --clean --if-exists --dbname=URL {file}")
    path, at = data_dir.expanduser() / DATABASE, time.time()
    folder = path.parent
    make_private_folder(folder)
    keys = maintenance.restore(file, path, lambda head: begin_new_log(folder, head, at))
    public_key = keys.signer.public_key.hex()
    show(
        {"database": str(path), "public_key": public_key},
        as_json,
        f"restored {path} from {file}",
        f"later receipts are signed with a new key: {public_key}",
    )


@command.command("compact")
@data_dir_option
@store_option
@json_option
def compact(data_dir: Path, store: str, as_json: bool) -> None:
    """Rewrite the database without free space."""
    _check_file(store, "vacuumdb --full --dbname=URL")
    path = _database(data_dir)
    before, after = maintenance.compact(path)
    sizes = f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now"
    shown = {"bytes_before": before, "bytes_after": after}
    show(shown, as_json, f"{path}: {sizes}")


@command.command("copy")
@data_dir_option
@store_option
@json_option
def copy(data_dir: Path, store: str, as_json: bool) -> None:
    """Copy the database of a stopped coordinator to a PostgreSQL server.

    The database there must be empty.  Clients' files are copied as well.  All files in
    the data folder stay as they are.
    """
    path = _database(data_dir)
    if not store:
        raise ConfigError(f"--store: expected where to copy {path} to, as {EXAMPLE}")
    name = store_at(store, data_dir).name
    from shoal.store.postgres.maintenance import copy as copied_to  # late: with psycopg

    rows = asyncio.run(copied_to(path, store))
    lines = [
        f"copied {rows['jobs']} jobs, {rows.pop('contents')} files and "
        f"{sum(rows.values())} rows in all to {name}",
        f"start `shoal serve` with --store; {path} is not used any more",
    ]
    show({"database": name, "rows": rows}, as_json, *lines)


def newest_backup(folder: Path) -> Path | None:
    """Return the newest backup that is known and still there."""
    try:
        text = (folder / NEWEST_BACKUP).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    backup = Path(text.strip())
    return backup if backup.is_file() else None


def _check_file(store: str, instead: str) -> None:
    """Raise ConfigError if the database is on a server, which has its own programs."""
    if store:
        raise ConfigError(
            "the database is on a PostgreSQL server, which has a program for this: "
            f"{instead}"
        )


def _log_problems(
    folder: Path, read: Callable[[int], tuple[int, bytes | None]]
) -> list[str]:
    """Return why the database is not the one that the folder's key has signed.

    ``read`` returns how many receipts it has, and the root of its log at a size.
    """
    from shoal.store.signing_keys import (  # late: with cryptography
        history_problem,
        shown_checkpoint,
    )

    if (shown := shown_checkpoint(folder)) is None:
        return []
    problem = history_problem(shown, *read(shown.size))
    return [] if problem is None else [problem]


def _database(data_dir: Path) -> Path:
    """Return the path of the database in a data folder.

    Raises StoreError if there is none.
    """
    path = data_dir.expanduser() / DATABASE
    if not path.exists():
        raise StoreError(
            "is missing: give the coordinator's --data-dir, or --store if the database "
            "is on a PostgreSQL server",
            str(path),
        )
    return path
