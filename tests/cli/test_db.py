"""``shoal db``: backups and restoring them, damage, and free space."""

import asyncio
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from shoal.cli.main import main
from shoal.domain.facts import JobCancelled, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.ledger import accounts
from shoal.store.ledger import LedgerEntries
from shoal.store.sqlite import database, maintenance
from shoal.store.sqlite.database import SqliteStore, migrate
from store.test_ledger import StoredLog


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("SHOAL_DATA_DIR", str(folder))
    return folder


async def opened(folder: Path) -> SqliteStore:
    store = SqliteStore(folder / "shoal.db")
    await store.open()
    return store


def submitted(name: str) -> JobSubmitted:
    text = Random(name).randbytes(1000).hex()  # hard to compress
    chat = Chat("m", ({"role": "user", "content": text},))
    return JobSubmitted(Job(JobId(name), chat))


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def test_database_that_nobody_uses_is_checked_and_copied(
    folder: Path, tmp_path: Path
) -> None:
    store = await opened(folder)
    await store.append([submitted("a")], 1.0)
    await store.close()

    assert main(["db", "check"]) == 0
    assert main(["db", "backup", str(tmp_path / "copy.db")]) == 0

    with closing(sqlite3.connect(tmp_path / "copy.db")) as sql:
        assert sql.execute("SELECT id FROM jobs").fetchall() == [("a",)]


async def test_backup_of_an_open_database_can_be_restored(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "backup.db"
    store = await opened(folder)
    await store.append(
        [submitted("a")], 1.0, (), LedgerEntries(accounts.credit("user:al", 7))
    )
    before = await store.open_jobs(), await store.history(JobId("a"))

    assert main(["db", "backup", str(copy)]) == 0

    await store.append([submitted("later")], 2.0)
    await store.close()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert main(["db", "restore", str(copy)]) == 0
    assert main(["db", "check"]) == 0
    restored = await opened(folder)
    assert (await restored.open_jobs(), await restored.history(JobId("a"))) == before
    opening = await restored.ledger.load()
    assert opening.accounts["user:al"].balance == 7
    await restored.close()
    assert "no damage found" in capsys.readouterr().out
    replaced = SqliteStore(folder / "shoal.old-1.db")
    await replaced.open()
    assert len(await replaced.open_jobs()) == 2
    await replaced.close()
    assert copy.exists()


async def test_backup_in_steps_is_that_of_one_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(folder)
    await store.append([submitted(f"j{number}") for number in range(50)], 1.0)
    steps = 0

    def commit(_: float) -> None:
        nonlocal steps
        steps += 1
        with closing(sqlite3.connect(folder / "shoal.db")) as other, other:
            other.execute("INSERT INTO payments VALUES (?, 'j', 1.0)", (str(steps),))

    monkeypatch.setattr(maintenance, "COPIED_AT_ONCE", 8)
    monkeypatch.setattr("shoal.store.sqlite.maintenance.time.sleep", commit)

    assert main(["db", "backup", str(tmp_path / "copy.db")]) == 0

    assert steps > 5
    assert maintenance.check(tmp_path / "copy.db") == []
    with closing(sqlite3.connect(tmp_path / "copy.db")) as sql:
        assert sql.execute("SELECT count(*) FROM payments").fetchone() == (0,)
        assert sql.execute("SELECT count(*) FROM jobs").fetchone() == (50,)
    await store.close()


async def test_a_database_in_use_is_not_replaced(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(database, "LOCK_ATTEMPTS", 1)
    store = await opened(folder)
    assert main(["db", "backup", str(tmp_path / "copy.db")]) == 0
    before = names(folder)

    assert main(["db", "restore", str(tmp_path / "copy.db")]) == 1

    assert "is in use" in capsys.readouterr().err
    assert names(folder) == before
    await store.close()


async def test_what_is_no_backup_replaces_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await opened(folder)
    await store.append([submitted(f"j{number}") for number in range(100)], 1.0)
    await store.close()
    before = names(folder)
    damaged, other = tmp_path / "damaged.db", tmp_path / "other.db"
    data = bytearray((folder / "shoal.db").read_bytes())
    damaged.write_bytes(bytes(data[: len(data) // 2]) + bytes(len(data) // 2))
    other.write_bytes(b"")
    newer = tmp_path / "newer.db"
    with closing(sqlite3.connect(newer, isolation_level=None)) as sql:
        sql.execute("PRAGMA user_version = 1000")

    for file in (damaged, other, newer, tmp_path / "missing.db"):
        assert main(["db", "restore", str(file)]) == 1
        assert str(file) in capsys.readouterr().err

    assert names(folder) == before


async def test_a_restore_that_was_interrupted_is_repeated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.db"
    store = await opened(folder)
    await store.append([submitted("a")], 1.0)
    await store.close()
    assert main(["db", "backup", str(copy)]) == 0

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shoal.store.signing_keys.begin_new_log", killed)
        assert main(["db", "restore", str(copy)]) == 130
    assert not {"shoal.db", "shoal.db.part"} & {*names(folder)}

    assert main(["db", "restore", str(copy)]) == 0

    store = await opened(folder)
    assert [each.job.id for each in await store.open_jobs()] == ["a"]
    await store.close()


@pytest.mark.parametrize("renames", [0, 1, 2])
async def test_a_database_and_its_log_are_moved_aside_together_whatever_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    copy, crashed = tmp_path / "copy.db", tmp_path / "crashed"
    store = await opened(folder)
    assert main(["db", "backup", str(copy)]) == 0
    await store.append([submitted("a")], 1.0)
    crashed.mkdir()
    for name in ("shoal.db", "shoal.db-wal"):  # as a kill leaves them
        shutil.copy(folder / name, crashed / name)
    await store.close()
    for name in ("shoal.db", "shoal.db-wal"):
        shutil.copy(crashed / name, folder / name)
    rename, left = Path.rename, [None] * renames

    def killed(self: Path, target: Path | str) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        assert main(["db", "restore", str(copy)]) == 130

    assert main(["db", "restore", str(copy)]) == 0

    replaced = SqliteStore(folder / "shoal.old-1.db")
    await replaced.open()
    assert [each.job.id for each in await replaced.open_jobs()] == ["a"]
    await replaced.close()
    assert not [each for each in names(folder) if "old-2" in each or "moving" in each]


async def test_backup_names_the_files_that_are_not_in_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await (await opened(folder)).close()

    assert main(["db", "backup", str(tmp_path / "one.db")]) == 0
    (folder / "files").mkdir()
    (folder / "files" / "file-1").write_text("a line")
    assert main(["db", "backup", str(tmp_path / "two.db")]) == 0

    first, second, *rest = capsys.readouterr().out.splitlines()
    assert [first, second] == [f"wrote {tmp_path / name}.db" for name in ("one", "two")]
    assert rest == [
        f"clients' files are not in the backup: copy {folder / 'files'} as well"
    ]


async def test_backup_overwrites_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await (await opened(folder)).close()
    copy = tmp_path / "backup.db"
    copy.write_text("mine")

    assert main(["db", "backup", str(copy)]) == 1
    assert copy.read_text() == "mine"
    assert f"{copy} exists" in capsys.readouterr().err
    assert main(["db", "backup", str(tmp_path / "none" / "backup.db")]) == 1
    assert names(tmp_path) == ["backup.db", "data"]


def test_missing_database_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["check"], ["backup", str(tmp_path / "copy.db")], ["compact"]):
        assert main(["db", *command]) == 1
        said = capsys.readouterr().err
        assert "shoal.db: is missing: " in said
        assert "--store" in said
    assert [*folder.iterdir()] == []
    assert not (tmp_path / "copy.db").exists()


async def test_damage_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await opened(folder)
    await store.append([submitted(f"j{number}") for number in range(100)], 1.0)
    await store.close()
    path = folder / "shoal.db"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)
    path.write_bytes(data)

    assert main(["db", "check"]) == 1
    assert "shoal.db: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE receipts SET body = ? WHERE leaf = 3", "receipt 3 is not the one"),
        (
            "UPDATE receipts SET body = x'01ff' WHERE leaf = 3 AND ? <> ''",
            "receipt 3: a comp",
        ),
        ("UPDATE tree SET hash = ? WHERE number = 5", "is not the one in the log"),
        ("DELETE FROM receipts WHERE leaf = 2 AND ? <> ''", "receipt 2 is missing"),
        ("DELETE FROM receipts WHERE leaf = 6 AND ? <> ''", "the 6 receipts are not"),
        ("UPDATE checkpoints SET root = ?", "the 7 receipts are not those"),
    ],
)
async def test_receipts_that_are_not_those_of_the_log_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    store = await opened(folder)
    log = StoredLog(store)
    for number in range(7):
        await log.add(f"j{number}")
    assert main(["db", "check"]) == 0
    await store.database.transact(lambda sql: sql.execute(change, (b"{}",)))
    await store.close()

    assert main(["db", "check"]) == 1

    assert says in capsys.readouterr().err


async def test_books_that_do_not_balance_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await opened(folder)
    await store.database.transact(
        lambda sql: sql.execute("INSERT INTO accounts VALUES ('user:al', 5, NULL)")
    )

    assert main(["db", "check"]) == 1
    await store.close()
    assert "the accounts sum to 5 micro-dollars" in capsys.readouterr().err


async def test_old_database_can_shrink_after_it_was_compacted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(database, "LOCK_ATTEMPTS", 1)
    path = folder / "shoal.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as sql:
        migrate(sql)  # without PRAGMA auto_vacuum, as before
    store = await opened(folder)
    jobs = [f"j{number}" for number in range(400)]
    await store.append([submitted(name) for name in jobs], 1.0)
    assert main(["db", "compact"]) == 1  # while the store is open
    await store.append([JobCancelled(JobId(name), "") for name in jobs], 2.0)
    await store.prune(3.0)
    await store.append([submitted("kept")], 4.0)
    await store.close()
    size = path.stat().st_size

    assert main(["db", "compact"]) == 0

    assert path.stat().st_size < size / 2
    with closing(sqlite3.connect(path)) as sql:
        assert sql.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # incremental
    store = await opened(folder)
    assert [each.job.id for each in await store.open_jobs()] == ["kept"]
    await store.close()
    assert "is in use" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
async def test_backup_that_fails_half_way_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    store = await opened(folder)
    await store.append([submitted(f"j{number}") for number in range(400)], 1.0)
    await store.close()
    copy = tmp_path / "copy.db"
    # The limit is the process's, so it is one of its own that runs into it.
    program = f"""
import resource, signal, sys
from shoal.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
sys.exit(main(["db", "backup", {str(copy)!r}]))
"""

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stderr=subprocess.PIPE
    )
    _, errors = await process.communicate()

    assert process.returncode == 1
    assert f"{folder / 'shoal.db'} to {copy}: " in errors.decode()
    assert names(tmp_path) == ["data"]


async def test_compacting_without_space_is_refused_before_it_fills_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await (await opened(folder)).close()
    with (folder / "shoal.db").open("r+b") as file:
        file.truncate(1 << 43)  # takes no space

    assert main(["db", "compact"]) == 1

    assert "compacting it needs 8,796,093,022,208 bytes" in capsys.readouterr().err
