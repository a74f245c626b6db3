"""The file that names the newest backup of a database, for who has to restore it."""

from contextlib import suppress
from pathlib import Path

from shoal.config.private_files import write_private

FILE = "newest-backup"


def note_backup(folder: Path, backup: Path) -> None:
    """Note where a backup of the database in a data folder is."""
    with suppress(OSError):  # the backup is made, also of a folder that is read only
        write_private(folder / FILE, f"{backup.absolute()}\n")


def newest_backup(folder: Path) -> Path | None:
    """Return the newest backup that is known and still there."""
    try:
        backup = Path((folder / FILE).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return backup if backup.is_file() else None
