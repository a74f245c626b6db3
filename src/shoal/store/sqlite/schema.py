"""The migrations that create the tables of the SQLite store.

Step n takes a database from version n to n + 1; a released step never changes.  The
version is SQLite's ``user_version``.
"""

import sqlite3

from shoal.domain.errors import StoreError

MIGRATIONS = (
    """
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        model TEXT NOT NULL,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        work TEXT NOT NULL,
        limits TEXT NOT NULL,
        lease INTEGER NOT NULL DEFAULT 0,
        outcome TEXT,
        error TEXT,
        submitted_at REAL NOT NULL,
        ended_at REAL
    ) STRICT;
    CREATE INDEX jobs_open ON jobs (submitted_at) WHERE ended_at IS NULL;
    CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
    CREATE TABLE facts (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        type TEXT NOT NULL,
        job_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX facts_of_job ON facts (job_id, number) WHERE job_id IS NOT NULL;
    CREATE INDEX facts_of_workers ON facts (at) WHERE job_id IS NULL;
    """,
    """
    ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE jobs ADD COLUMN idempotency_key TEXT;
    CREATE UNIQUE INDEX jobs_named ON jobs (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    """,
    # A key's jobs are those whose owner has its name.
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        start TEXT NOT NULL,
        scope TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL,
        requests_per_minute INTEGER,
        tokens_per_minute INTEGER,
        tokens_per_day INTEGER,
        budget INTEGER
    ) STRICT;
    CREATE UNIQUE INDEX keys_living ON keys (name) WHERE revoked_at IS NULL;
    CREATE TABLE join_tokens (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL,
        uses_max INTEGER,
        models TEXT NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX join_tokens_living ON join_tokens (name)
        WHERE revoked_at IS NULL;
    CREATE TABLE join_token_workers (
        token_id TEXT NOT NULL,
        worker TEXT NOT NULL,
        PRIMARY KEY (token_id, worker)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE usage (
        owner TEXT NOT NULL,
        day INTEGER NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        PRIMARY KEY (owner, day)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX jobs_of_owner ON jobs (owner, submitted_at);
    """,
    # Amounts are micro-dollars.  The log of receipts is a Merkle tree (RFC 6962): its
    # leaves are receipts, and ``tree`` has the hashes of complete subtrees, in the
    # order in which they became so: what only grows at its end is cheap to write.
    """
    ALTER TABLE jobs ADD COLUMN terms TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE jobs ADD COLUMN user TEXT NOT NULL DEFAULT '';
    CREATE INDEX jobs_of_user ON jobs (owner, user) WHERE user <> '';
    CREATE TABLE accounts (
        name TEXT PRIMARY KEY,
        balance INTEGER NOT NULL,
        budget INTEGER
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE transfers (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        job_id TEXT,
        debit TEXT NOT NULL,
        credit TEXT NOT NULL,
        amount INTEGER NOT NULL CHECK (amount > 0),
        why TEXT NOT NULL
    ) STRICT;
    CREATE TABLE receipts (
        leaf INTEGER PRIMARY KEY,
        job_id TEXT NOT NULL,
        at REAL NOT NULL,
        body BLOB NOT NULL,
        signature BLOB NOT NULL
    ) STRICT;
    CREATE INDEX receipts_of_job ON receipts (job_id);
    CREATE TABLE tree (
        number INTEGER PRIMARY KEY,
        hash BLOB NOT NULL
    ) STRICT;
    CREATE TABLE checkpoints (
        size INTEGER PRIMARY KEY,
        root BLOB NOT NULL,
        at REAL NOT NULL,
        note TEXT NOT NULL
    ) STRICT;
    CREATE TABLE payments (
        reference TEXT PRIMARY KEY,
        job_id TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE trusted (
        owner TEXT NOT NULL,
        user TEXT NOT NULL,
        public_key TEXT NOT NULL,
        paired_at REAL NOT NULL,
        PRIMARY KEY (owner, user, public_key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE pairing_codes (
        code TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        user TEXT NOT NULL,
        expires_at REAL NOT NULL,
        public_key TEXT,
        claimed_at REAL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE calls (
        job_id TEXT PRIMARY KEY,
        url TEXT NOT NULL,
        secret TEXT NOT NULL,
        host TEXT NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        due_at REAL,
        error TEXT
    ) STRICT;
    CREATE INDEX calls_due ON calls (due_at) WHERE due_at IS NOT NULL;
    """,
    # A call of a function and what it returned are bytes, which JSON has no form for.
    # Such a job has no ``work``.
    """
    ALTER TABLE jobs ADD COLUMN call BLOB;
    ALTER TABLE jobs ADD COLUMN value BLOB;
    """,
    # A renamed table keeps its indexes under their old names.
    """
    ALTER TABLE calls RENAME TO webhook_deliveries;
    DROP INDEX calls_due;
    CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_at)
        WHERE due_at IS NOT NULL;
    ALTER TABLE jobs RENAME COLUMN call TO function_call;
    """,
    # Facts are pruned; an operator's order holds until it is revoked.
    """
    CREATE TABLE suspensions (
        name TEXT PRIMARY KEY,
        how TEXT NOT NULL,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    # Each list is in the order of an index: the entries of equal keys are in the order
    # of their rows.  A receipt outlives its job.
    """
    DROP INDEX jobs_of_owner;
    CREATE INDEX jobs_of_owner ON jobs (owner, state);
    CREATE INDEX jobs_of_state ON jobs (state);
    CREATE INDEX transfers_from ON transfers (debit);
    CREATE INDEX transfers_to ON transfers (credit);
    ALTER TABLE receipts ADD COLUMN owner TEXT;
    UPDATE receipts SET owner = (SELECT owner FROM jobs WHERE id = receipts.job_id);
    CREATE INDEX receipts_of_owner ON receipts (owner) WHERE owner IS NOT NULL;
    CREATE INDEX pairing_codes_of_owner ON pairing_codes (owner, expires_at);
    CREATE INDEX pairing_codes_by_expiry ON pairing_codes (expires_at);
    """,
    # The highest priority of a key's jobs; older keys may give any.
    """
    ALTER TABLE keys ADD COLUMN priority_max INTEGER NOT NULL DEFAULT 2;
    """,
    # The texts of a job, compressed, and the facts about it.  Jobs and receipts stay
    # as earlier versions wrote them, and so do the facts about those jobs: to rewrite
    # a million of them would take minutes, and most are pruned soon.
    """
    ALTER TABLE jobs ADD COLUMN packed_work BLOB;
    ALTER TABLE jobs ADD COLUMN packed_outcome BLOB;
    ALTER TABLE jobs ADD COLUMN packed_history BLOB;
    """,
    # Lists are in the order of ``number``.  The results of a batch's lines stay until
    # they are in files.
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size INTEGER NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL
    ) STRICT;
    CREATE INDEX files_of_owner ON files (owner);
    CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file TEXT NOT NULL,
        time_window TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        metadata TEXT,
        status TEXT NOT NULL,
        model TEXT NOT NULL,
        lines INTEGER NOT NULL,
        completed INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        errors TEXT NOT NULL,
        output_file TEXT,
        error_file TEXT,
        times TEXT NOT NULL,
        has_results INTEGER NOT NULL DEFAULT 1,
        ended_at REAL
    ) STRICT;
    CREATE INDEX batches_of_owner ON batches (owner);
    CREATE INDEX batches_open ON batches (created_at) WHERE ended_at IS NULL;
    CREATE INDEX batches_open_of_owner ON batches (owner) WHERE ended_at IS NULL;
    CREATE INDEX batches_reading ON batches (input_file) WHERE ended_at IS NULL;
    CREATE INDEX batches_ended ON batches (ended_at) WHERE ended_at IS NOT NULL;
    CREATE INDEX batches_with_results ON batches (id)
        WHERE has_results AND ended_at IS NOT NULL;
    CREATE TABLE batch_results (
        batch_id TEXT NOT NULL,
        line INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) STRICT;
    """,
    # The parts of large works, which are written before their jobs are submitted and
    # deleted after them.  Meanwhile no job claims them.
    """
    CREATE TABLE work_parts (
        number INTEGER PRIMARY KEY,
        job_id TEXT NOT NULL,
        part INTEGER NOT NULL,
        data BLOB NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX work_parts_of_job ON work_parts (job_id, part);
    CREATE TABLE unclaimed_works (
        job_id TEXT PRIMARY KEY
    ) STRICT, WITHOUT ROWID;
    """,
    # As in ``WorkerApproved``.  Facts are pruned; an approval holds until a removal.
    """
    CREATE TABLE approvals (
        name TEXT NOT NULL,
        public_key TEXT,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
    CREATE INDEX approvals_of_name ON approvals (name);
    """,
    # Usage by key, model and node; the cost is in micro-dollars.  Of earlier days, only
    # the key is known.  Facts about workers are listed, among those of jobs from
    # earlier versions.
    """
    CREATE TABLE usage_by_model (
        day INTEGER NOT NULL,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        node TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        cost INTEGER NOT NULL,
        PRIMARY KEY (day, owner, model, node)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX usage_of_owner ON usage_by_model (owner, day);
    INSERT INTO usage_by_model
        SELECT day, owner, '', '', requests, prompt_tokens, completion_tokens, 0
        FROM usage WHERE day >= 0;
    CREATE INDEX worker_facts ON facts (number) WHERE job_id IS NULL;
    """,
    # Usage by minute, as in ``MinuteUsage``: few rows, for the last hours.  And usage
    # added up by some of key, model and node, the bits 1, 2 and 4 of ``fields``; the
    # others are empty.  Pruning fills it, the oldest day first.
    """
    CREATE TABLE usage_by_minute (
        minute INTEGER PRIMARY KEY,
        jobs INTEGER NOT NULL,
        tokens INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE usage_sums (
        fields INTEGER NOT NULL,
        day INTEGER NOT NULL,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        node TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        cost INTEGER NOT NULL,
        PRIMARY KEY (fields, day, owner, model, node)
    ) STRICT, WITHOUT ROWID;
    """,
    # The places in lists of the last files and batches that were deleted: a client may
    # be at one of them.  And the owner of each delivery, by which the first one of each
    # owner and host is found.
    """
    CREATE TABLE deleted_places (
        deletion INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        number INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX deleted_places_by_number ON deleted_places (number);
    CREATE TRIGGER deleted_places_bound AFTER INSERT ON deleted_places BEGIN
        DELETE FROM deleted_places WHERE deletion <= new.deletion - 20000;
    END;
    CREATE TRIGGER file_deleted AFTER DELETE ON files BEGIN
        INSERT INTO deleted_places (id, owner, number)
            VALUES (old.id, old.owner, old.number);
    END;
    CREATE TRIGGER batch_deleted AFTER DELETE ON batches BEGIN
        INSERT INTO deleted_places (id, owner, number)
            VALUES (old.id, old.owner, old.number);
    END;
    ALTER TABLE webhook_deliveries ADD COLUMN owner TEXT NOT NULL DEFAULT '';
    UPDATE webhook_deliveries SET owner = jobs.owner FROM jobs WHERE jobs.id = job_id;
    CREATE INDEX webhook_deliveries_of_lane ON webhook_deliveries (owner, host, due_at)
        WHERE due_at IS NOT NULL;
    """,
    # The open jobs of each minute.  Usage of a key is read a day at a time, by the
    # primary key.
    """
    ALTER TABLE usage_by_minute ADD COLUMN running INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE usage_by_minute ADD COLUMN queued INTEGER NOT NULL DEFAULT 0;
    DROP INDEX usage_of_owner;
    """,
    # The last commit of each writer, in the epoch that all have: see ``commits``.
    """
    CREATE TABLE writers (
        name TEXT PRIMARY KEY,
        epoch INTEGER NOT NULL,
        number INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    INSERT INTO writers VALUES ('hub', 0, 0), ('calls', 0, 0);
    """,
    # As in ``AliasSet``; ``models`` is a list in JSON.  An alias outlives its fact.
    """
    CREATE TABLE aliases (
        name TEXT PRIMARY KEY,
        models TEXT NOT NULL,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    # A few hundred rows at most.  They are in the order of ``number``, and known by the
    # SHA-256 of a cookie's value or of a code, and of the key that each stands for.
    """
    CREATE TABLE browser_sessions (
        number INTEGER PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        key_digest BLOB NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
    CREATE TABLE sign_in_codes (
        number INTEGER PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        key_digest BLOB NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
    """,
    # ``body`` is a ``DeploymentSet`` in JSON.  A deployment outlives its fact.
    """
    CREATE TABLE deployments (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    # As in ``Key``.
    """
    ALTER TABLE keys ADD COLUMN hosted_after REAL;
    """,
)


def migrate(database: sqlite3.Connection) -> None:
    """Migrate a database to the present version, in one transaction.

    A new database waits for the disk once, not once for each step.

    Raises StoreError if a newer Shoal wrote it.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    present = len(MIGRATIONS)
    if version > present:
        raise StoreError(
            f"the database has version {version}, this Shoal knows up to "
            f"{present}: install the newer Shoal that wrote it"
        )
    if version < present:
        steps = " ".join(MIGRATIONS[version:])
        database.executescript(
            f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {present}; COMMIT;"
        )
