"""Checks the history of a coordinator: its database against what clients were told."""

import base64
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from live import databases
from live.clients import History
from live.laws import BALANCED, FIGURES, LAWS, POSTED, prepare
from shoal.store.packing import unpack

SHOWN_MAX = 5  # offenders named for each law
RECEIPT = b"shoal receipt v1\n"

NEWEST = """SELECT (SELECT max(rowid) FROM jobs), (SELECT max(ended_at) FROM jobs),
                   (SELECT max(number) FROM facts), (SELECT max(number) FROM transfers),
                   (SELECT total(length(packed_history)) FROM jobs
                    WHERE ended_at IS NULL)"""
MADE = "SELECT 1 FROM pragma_table_info('jobs') WHERE name = 'packed_history'"
"""What finds nothing in a database that is just being made."""


def inspect(
    data: Path, checkpoints: Mapping[int, str], always: Mapping[str, str] = BALANCED
) -> tuple[int, list[str]]:
    """Look at the database that a killed coordinator has left in its data folder.

    Returns how many commits were looked at, and what was wrong: who breaks the laws
    that hold ``always``, after each commit, which checkpoint that was given out is not
    there, and what is not as it was posted.
    """
    found: list[str] = []
    commits, newest = 0, None
    with TemporaryDirectory() as folder:
        file = databases.copied(data, Path(folder) / "found")
        for database in databases.commits(file):
            if database.execute(MADE).fetchone() is not None:
                commits, newest = commits + 1, database.execute(NEWEST).fetchone()
                found += map(str, broken(database, always).items())
        with databases.opened(file) as database:
            if newest not in (None, database.execute(NEWEST).fetchone()):
                found.append("the last commit is another one than SQLite finds")
            prepare(database)
            found += map(str, broken(database, {**always, **POSTED}).items())
            stored = dict(database.execute("SELECT size, note FROM checkpoints"))
    missing = [size for size, note in checkpoints.items() if stored.get(size) != note]
    return commits, found + [
        f"the checkpoint of {size} is not there" for size in missing
    ]


def check_shown(database: sqlite3.Connection, history: History) -> None:
    """Put what clients were told beside what is stored."""
    prepare(database)
    accepted = [(key, job) for key, jobs in history.accepted.items() for job in jobs]
    ends = [(job, status) for job, each in history.ends.items() for status in each]
    read = [(job, digest) for job, each in history.read.items() for digest in each]
    database.executemany("INSERT INTO accepted VALUES (?, ?)", accepted)
    database.executemany("INSERT INTO done VALUES (?, ?)", history.done.items())
    cancelled = [(job,) for job in history.cancelled]
    database.executemany("INSERT INTO cancelled VALUES (?)", cancelled)
    database.executemany("INSERT INTO told VALUES (?, ?)", ends)
    database.executemany("INSERT INTO read VALUES (?, ?)", read)
    database.commit()  # so that whoever tries a forgery can take it back alone


def broken(
    database: sqlite3.Connection, laws: Mapping[str, str] = LAWS
) -> dict[str, list[object]]:
    """Return who breaks which law, the first few of each."""
    offenders = {
        law: [who for (who,) in database.execute(query).fetchmany(SHOWN_MAX)]
        for law, query in laws.items()
    }
    return {law: found for law, found in offenders.items() if found}


def figures(database: sqlite3.Connection) -> dict[str, int]:
    """Return what happened, in numbers."""
    return {
        name: database.execute(query).fetchone()[0] for name, query in FIGURES.items()
    }


def unsigned(database: sqlite3.Connection, public_key: bytes) -> Iterator[int]:
    """Yield the receipts, by their place in the log, that the coordinator has not
    signed, or not the worker that is said to have proved it."""
    for leaf, packed, signature in database.execute(
        "SELECT leaf, body, signature FROM receipts"
    ):
        body = unpack(packed)
        receipt = json.loads(body)
        proved = receipt["verdict"] != "valid" or _is_proved(receipt)
        if not (proved and _is_signed(public_key, signature, RECEIPT + body)):
            yield leaf


def root(database: sqlite3.Connection) -> bytes:
    """Return the root of the tree over all receipts (RFC 6962, section 2.1)."""
    bodies = database.execute("SELECT body FROM receipts ORDER BY leaf")
    return _root([hashlib.sha256(b"\0" + unpack(each)).digest() for (each,) in bodies])


def _is_proved(receipt: dict[str, Any]) -> bool:
    worker_receipt, key = receipt["worker_receipt"], receipt["worker_key"]
    claims = json.loads(worker_receipt["body"])
    return (
        claims["job_id"] == receipt["job_id"]
        and claims["provider_pubkey"] == key
        and claims["output_hash"].removeprefix("sha256:") == receipt["output_hash"][7:]
        and _is_signed(
            bytes.fromhex(key),
            base64.b64decode(worker_receipt["signature"]),
            worker_receipt["body"].encode(),
        )
    )


def _is_signed(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _root(hashes: list[bytes]) -> bytes:
    if len(hashes) == 1:
        return hashes[0]
    half = 1 << (len(hashes) - 1).bit_length() - 1
    left, right = _root(hashes[:half]), _root(hashes[half:])
    return hashlib.sha256(b"\1" + left + right).digest()
