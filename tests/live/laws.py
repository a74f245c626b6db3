"""Invariants of jobs, payments and receipts, as queries for violations.

The tables of the clients' side are ``accepted`` and ``done`` (an idempotency key and
its job), ``cancelled`` (job), ``told`` (job and with which status it ended) and
``read`` (job and the hash of its result).
"""

import sqlite3
from collections.abc import Mapping

from shoal.store.packing import unpack

# ``named`` has the jobs with the keys that clients put into the payload: who loses its
# idempotency key to a later job still has that one.
VIEWS = """
    CREATE TEMP TABLE accepted (key TEXT, job TEXT);
    CREATE TEMP TABLE done (key TEXT, job TEXT);
    CREATE TEMP TABLE cancelled (job TEXT);
    CREATE TEMP TABLE told (job TEXT, status TEXT);
    CREATE TEMP TABLE read (job TEXT, digest TEXT);
    CREATE TEMP VIEW named AS
        SELECT id, state,
            json_extract(json_extract(unpacked(packed_work), '$.form'), '$.key') AS key
        FROM jobs WHERE key IS NOT NULL;
    CREATE TEMP VIEW stories AS
        SELECT jobs.id AS job, line.key AS number,
            json_extract(line.value, '$[0]') AS at,
            json_extract(line.value, '$[1]') AS type
        FROM jobs, json_each(listed(packed_history)) AS line
        UNION ALL
        SELECT job_id, 1000000 + number, at, type FROM facts WHERE job_id IS NOT NULL;
    CREATE TEMP VIEW ends AS
        SELECT job, type FROM stories
        WHERE type IN ('JobCompleted', 'JobFailed', 'JobCancelled', 'JobExpired');
    CREATE TEMP VIEW moved AS
        SELECT id AS job,
            sum(why = 'reserved') AS reserved, sum(why = 'released') AS released,
            sum(why = 'paid') AS paid, sum(why = 'fee') AS fee,
            total(amount * ((credit = 'pool:held') - (debit = 'pool:held'))) AS held
        FROM jobs LEFT JOIN transfers ON job_id = id GROUP BY id;
    CREATE TEMP VIEW filed AS
        SELECT leaf, job_id AS job,
            json_extract(unpacked(body), '$.verdict') AS verdict,
            json_extract(unpacked(body), '$.output_hash') AS output_hash
        FROM receipts;
    CREATE TEMP VIEW posted AS
        SELECT credit AS name, amount FROM transfers
        UNION ALL SELECT debit, -amount FROM transfers;
"""


def prepare(database: sqlite3.Connection) -> None:
    """Make the views of the laws, which read what is compressed, too."""
    for make in (unpacked, listed):
        database.create_function(make.__name__, 1, make, deterministic=True)
    database.executescript(VIEWS)


def unpacked(packed: bytes | None) -> str | None:
    """Return a compressed text."""
    return None if packed is None else unpack(packed).decode()


def listed(packed: bytes | None) -> str:
    """Return a list of the facts in a job's row."""
    lines = (unpacked(packed) or "").rstrip("\n")
    return f"[{lines.replace(chr(10), ',')}]"


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
        SELECT job FROM stories AS each JOIN stories AS last USING (job)
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
BOOKS: Mapping[str, str] = {
    "every price is reserved once": "SELECT job FROM moved WHERE reserved IS NOT 1",
    "nothing is held for a job that has ended": "SELECT job FROM moved WHERE held <> 0",
    "what was not done is given back": """
        SELECT job FROM moved JOIN jobs ON id = job
        WHERE released <> (state <> 'done')""",
    **POSTED,
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
LAWS: Mapping[str, str] = {**ENDS, **ONCE, **BOOKS, **RECEIPTS}

FIGURES: Mapping[str, str] = {
    **{
        state: f"SELECT count(*) FROM jobs WHERE state = '{state}'"
        for state in ("done", "failed", "cancelled", "expired")
    },
    "given again": "SELECT count(*) FROM stories WHERE type = 'JobRequeued'",
    "given to two": "SELECT count(*) FROM stories WHERE type = 'JobHedged'",
    "came late": "SELECT count(*) FROM stories WHERE type = 'CameLate'",
    "receipts": "SELECT count(*) FROM receipts",
    "proved later": """
        SELECT count(*) FROM filed AS later JOIN filed AS first USING (job)
        WHERE first.verdict = 'missing' AND later.verdict = 'valid'""",
    "transfers": "SELECT count(*) FROM transfers",
}
"""What has to have happened for the laws to have been tried."""
