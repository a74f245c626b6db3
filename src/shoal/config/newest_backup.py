"""The file that names the newest backup of a database, for the advice to restore it."""

from contextlib import suppress
from pathlib import Path

from shoal.config.private_files import write_private

FILE = "newest-backup"


def note_backup(folder: Path, backup: Path) -> None:
    """Record the path of a new backup of the database in a data folder."""
    with suppress(OSError):  # on a read-only folder, the backup was made all the same
        write_private(folder / FILE, f"{backup.absolute()}\n")


def newest_backup(folder: Path) -> Path | None:
    """Return the newest backup that is known and still there."""
    try:
        backup = Path((folder / FILE).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return backup if backup.is_file() else None
