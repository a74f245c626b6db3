"""``shoal db``: check, back up, restore and compact a coordinator's database."""

import time
from contextlib import suppress
from pathlib import Path

import click

from shoal.cli.options import data_dir_option, json_option
from shoal.cli.terminal import show
from shoal.config.private_files import make_private_folder, write_private
from shoal.store.file_folder import FILES_FOLDER
from shoal.store.sqlite import maintenance
from shoal.store.sqlite.database import DATABASE

NEWEST_BACKUP = "newest-backup"
"""The file of a data folder that names the newest backup, for advice to restore it."""


@click.group("db")
def command() -> None:
    """Check, back up, restore and compact a coordinator's database, on its machine."""


@command.command("check")
@data_dir_option
@json_option
def check(data_dir: Path, as_json: bool) -> int:
    """Check the database for damage, even while it is in use.

    Also checks that no receipt is missing that its key has signed.
    """
    path = _database(data_dir)
    problems = maintenance.check(path) or _log_problems(path)
    found = [] if problems else [f"{path}: no damage found"]
    show({"database": str(path), "problems": [*problems]}, as_json, *found)
    for each in () if as_json else problems:
        click.echo(f"{path}: {each}", err=True)
    return 1 if problems else 0


@command.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@data_dir_option
@json_option
def back_up(file: Path, data_dir: Path, as_json: bool) -> None:
    """Copy the database to a file, even while it is in use.

    FILE is the file to write; it must not exist.
    """
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
@json_option
def restore(file: Path, data_dir: Path, as_json: bool) -> None:
    """Replace the database of a stopped coordinator with a backup.

    FILE is a file written by `shoal db backup`; it is kept.  The present database is
    renamed to shoal.old-1.db.  Later receipts are signed with a new key, because the
    present one may have signed receipts that are not in FILE.
    """
    from shoal.store.signing_keys import begin_new_log  # late: with cryptography

    path, at = _database(data_dir), time.time()
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
@json_option
def compact(data_dir: Path, as_json: bool) -> None:
    """Rewrite the database without free space."""
    path = _database(data_dir)
    before, after = maintenance.compact(path)
    sizes = f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now"
    shown = {"bytes_before": before, "bytes_after": after}
    show(shown, as_json, f"{path}: {sizes}")


def newest_backup(folder: Path) -> Path | None:
    """Return the newest backup that is known and still there."""
    try:
        text = (folder / NEWEST_BACKUP).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    backup = Path(text.strip())
    return backup if backup.is_file() else None


def _log_problems(path: Path) -> list[str]:
    """Return why the database is not the one that the key beside it has signed."""
    from shoal.store.signing_keys import (  # late: with cryptography
        history_problem,
        shown_checkpoint,
    )

    if (shown := shown_checkpoint(path.parent)) is None:
        return []
    problem = history_problem(shown, *maintenance.size_and_root(path, shown.size))
    return [] if problem is None else [problem]


def _database(data_dir: Path) -> Path:
    return data_dir.expanduser() / DATABASE
