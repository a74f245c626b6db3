"""Checks the history of a coordinator: its database against what clients were told.

A law is a query for what breaks it.  The tables of the clients' side are ``accepted``
and ``done`` (an idempotency key and its job), ``cancelled`` (job), ``told`` (job and
with which status it ended) and ``read`` (job and the hash of its result).
"""

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

SHOWN_MAX = 5  # offenders named for each law
RECEIPT = b"shoal receipt v1\n"

# ``named`` has the jobs with the keys that clients put into the payload: who loses its
# idempotency key to a later job still has that one.
VIEWS = """
    CREATE TEMP TABLE accepted (key TEXT, job TEXT);
    CREATE TEMP TABLE done (key TEXT, job TEXT);
    CREATE TEMP TABLE cancelled (job TEXT);
    CREATE TEMP TABLE told (job TEXT, status TEXT);
    CREATE TEMP TABLE read (job TEXT, digest TEXT);
    CREATE TEMP VIEW named AS
        SELECT id, state, json_extract(json_extract(terms, '$.form'), '$.key') AS key
        FROM jobs;
    CREATE TEMP VIEW ends AS
        SELECT job_id AS job, type FROM facts
        WHERE type IN ('JobCompleted', 'JobFailed', 'JobCancelled', 'JobExpired');
    CREATE TEMP VIEW moved AS
        SELECT id AS job,
            sum(why = 'reserved') AS reserved, sum(why = 'released') AS released,
            sum(why = 'paid') AS paid, sum(why = 'fee') AS fee,
            total(amount * ((credit = 'pool:held') - (debit = 'pool:held'))) AS held
        FROM jobs LEFT JOIN transfers ON job_id = id GROUP BY id;
    CREATE TEMP VIEW filed AS
        SELECT leaf, job_id AS job,
            json_extract(CAST(body AS TEXT), '$.verdict') AS verdict,
            json_extract(CAST(body AS TEXT), '$.output_hash') AS output_hash
        FROM receipts;
    CREATE TEMP VIEW posted AS
        SELECT credit AS name, amount FROM transfers
        UNION ALL SELECT debit, -amount FROM transfers;
"""

ENDS: Mapping[str, str] = {
    "no accepted job is lost": """
        SELECT job FROM accepted WHERE job NOT IN (SELECT id FROM jobs)""",
    "every job has ended": "SELECT id FROM jobs WHERE ended_at IS NULL",
    "every job has exactly one end": """
        SELECT id FROM jobs LEFT JOIN ends ON job = id
        GROUP BY id HAVING count(job) <> 1""",
    "a job's state is that of its end": """
        SELECT id FROM jobs JOIN ends ON job = id
        WHERE type <> CASE state WHEN 'done' THEN 'JobCompleted'
            WHEN 'failed' THEN 'JobFailed' WHEN 'cancelled' THEN 'JobCancelled'
            ELSE 'JobExpired' END""",
    "how a job ended is what clients were told": """
        SELECT job FROM told JOIN jobs ON id = job
        WHERE (status = 'completed') <> (state = 'done')""",
    "what was cancelled stays so": """
        SELECT job FROM cancelled JOIN jobs ON id = job WHERE state <> 'cancelled'""",
    "why a job failed is known": """
        SELECT id FROM jobs WHERE state <> 'done' AND coalesce(error, '') = ''""",
    "nothing happens to a job after its end": """
        SELECT each.job_id FROM facts AS each JOIN facts AS last USING (job_id)
        WHERE last.type IN ('JobCompleted', 'JobFailed', 'JobCancelled', 'JobExpired')
            AND each.number > last.number
            AND each.type NOT IN ('CameLate', 'ReceiptPresented')""",
}
ONCE: Mapping[str, str] = {
    "no key is done twice": """
        SELECT key FROM named GROUP BY key HAVING sum(state = 'done') > 1""",
    "the job that is done is the one that the client was told": """
        SELECT done.key FROM done JOIN named ON id = job
        WHERE state <> 'done' OR named.key <> done.key""",
    "every reading of a result is the same": """
        SELECT job FROM read GROUP BY job HAVING count(DISTINCT digest) <> 1""",
    "what was read is what the receipts name": """
        SELECT job FROM read JOIN filed USING (job)
        WHERE output_hash <> 'sha256:' || digest""",
    "no job is paid for twice": "SELECT job FROM moved WHERE paid > 1 OR fee > 1",
    "no key is paid for twice": """
        SELECT key FROM named JOIN moved ON job = id GROUP BY key HAVING sum(paid) > 1
        """,
    "what is paid for is done, and proved if its wire can prove it": """
        SELECT job FROM moved JOIN jobs ON id = job
        WHERE coalesce(paid, 0) <> (state = 'done' AND EXISTS (SELECT 1 FROM filed
            WHERE filed.job = id AND verdict IN ('valid', 'unsigned')))""",
}
BOOKS: Mapping[str, str] = {
    "every price is reserved once": "SELECT job FROM moved WHERE reserved IS NOT 1",
    "nothing is held for a job that has ended": "SELECT job FROM moved WHERE held <> 0",
    "what was not done is given back": """
        SELECT job FROM moved JOIN jobs ON id = job
        WHERE released <> (state <> 'done')""",
}
BALANCED: Mapping[str, str] = {
    "all accounts sum to zero": "SELECT sum(balance) FROM accounts HAVING sum(balance)",
}
POSTED: Mapping[str, str] = {
    **BALANCED,
    "every balance is what was posted": """
        SELECT name FROM accounts LEFT JOIN posted USING (name)
        GROUP BY name HAVING balance <> coalesce(sum(amount), 0)""",
    "every posting is on an account": """
        SELECT name FROM posted WHERE name NOT IN (SELECT name FROM accounts)""",
}
RECEIPTS: Mapping[str, str] = {
    "what is done has a receipt, and nothing else": """
        SELECT id FROM jobs
        WHERE (state = 'done') <> (id IN (SELECT job_id FROM receipts))""",
    "at most one receipt of a job says that its worker proved it": """
        SELECT job FROM filed WHERE verdict = 'valid' GROUP BY job HAVING count(*) > 1
        """,
    "no worker's receipt is wrong": """
        SELECT job FROM filed WHERE verdict NOT IN ('valid', 'unsigned', 'missing')""",
    "the log has no gaps": """
        SELECT leaf FROM receipts WHERE leaf > 0
            AND leaf - 1 NOT IN (SELECT leaf FROM receipts)""",
    "the last checkpoint is of the whole log": """
        SELECT max(size) FROM checkpoints
        HAVING max(size) <> (SELECT count(*) FROM receipts)""",
}
LAWS: Mapping[str, str] = {**ENDS, **ONCE, **BOOKS, **POSTED, **RECEIPTS}

FIGURES: Mapping[str, str] = {
    **{
        state: f"SELECT count(*) FROM jobs WHERE state = '{state}'"
        for state in ("done", "failed", "cancelled", "expired")
    },
    "given again": "SELECT count(*) FROM facts WHERE type = 'JobRequeued'",
    "came late": "SELECT count(*) FROM facts WHERE type = 'CameLate'",
    "receipts": "SELECT count(*) FROM receipts",
    "proved later": """
        SELECT count(*) FROM filed AS later JOIN filed AS first USING (job)
        WHERE first.verdict = 'missing' AND later.verdict = 'valid'""",
    "transfers": "SELECT count(*) FROM transfers",
}
"""What has to have happened for the laws to have been tried."""


ACCOUNTS = "SELECT 1 FROM sqlite_schema WHERE name = 'accounts'"
"""What finds nothing in a database that is just being made."""


def left_behind(
    data: Path, checkpoints: Mapping[int, str], always: Mapping[str, str] = BALANCED
) -> tuple[int, list[str]]:
    """Look at the database that a killed coordinator has left in its data folder.

    Returns how many commits were looked at, and what was wrong: who breaks the laws
    that hold ``always``, after each commit, which checkpoint that was given out is not
    there, and what is not as it was posted.
    """
    found: list[str] = []
    commits = 0
    with TemporaryDirectory() as folder:
        file = databases.copied(data, Path(folder) / "found")
        for database in databases.commits(file):
            if database.execute(ACCOUNTS).fetchone() is not None:
                commits += 1
                found += map(str, broken(database, always).items())
        with databases.opened(file) as database:
            database.executescript(VIEWS)
            found += map(str, broken(database, {**always, **POSTED}).items())
            kept = dict(database.execute("SELECT size, note FROM checkpoints"))
    gone = [size for size, note in checkpoints.items() if kept.get(size) != note]
    return commits, found + [f"the checkpoint of {size} is not there" for size in gone]


def told(database: sqlite3.Connection, history: History) -> None:
    """Put what clients were told beside what is stored."""
    database.executescript(VIEWS)
    accepted = [(key, job) for key, jobs in history.accepted.items() for job in jobs]
    ends = [(job, status) for job, each in history.ends.items() for status in each]
    read = [(job, digest) for job, each in history.read.items() for digest in each]
    database.executemany("INSERT INTO accepted VALUES (?, ?)", accepted)
    database.executemany("INSERT INTO done VALUES (?, ?)", history.done.items())
    cancelled = [(job,) for job in history.cancelled]
    database.executemany("INSERT INTO cancelled VALUES (?)", cancelled)
    database.executemany("INSERT INTO told VALUES (?, ?)", ends)
    database.executemany("INSERT INTO read VALUES (?, ?)", read)


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
    for leaf, body, signature in database.execute(
        "SELECT leaf, body, signature FROM receipts"
    ):
        said = json.loads(body)
        proved = said["verdict"] != "valid" or _is_proved(said)
        if not (proved and _is_signed(public_key, signature, RECEIPT + body)):
            yield leaf


def root(database: sqlite3.Connection) -> bytes:
    """Return the root of the tree over all receipts (RFC 6962, section 2.1)."""
    bodies = database.execute("SELECT body FROM receipts ORDER BY leaf")
    return _root([hashlib.sha256(b"\0" + body).digest() for (body,) in bodies])


def _is_proved(said: dict[str, Any]) -> bool:
    given, key = said["worker_receipt"], said["worker_key"]
    claims = json.loads(given["body"])
    return (
        claims["job_id"] == said["job_id"]
        and claims["provider_pubkey"] == key
        and claims["output_hash"].removeprefix("sha256:") == said["output_hash"][7:]
        and _is_signed(
            bytes.fromhex(key),
            base64.b64decode(given["signature"]),
            given["body"].encode(),
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
