"""The migrations that create the store's tables, for both databases.

They are written for SQLite; ``postgres/schema`` translates them.  A released step never
changes.
"""

from shoal.domain.errors import StoreError

# Amounts are micro-dollars.  The log of receipts is a Merkle tree (RFC 6962): its
# leaves are receipts, and ``tree`` has the hashes of complete subtrees, in the order in
# which they became so: what only grows at its end is cheap to write.  Each list is in
# the order of an index: the entries of equal keys are in the order of their rows.
#
# - accounts and keys: a key's jobs are those whose owner has its name.
# - approvals: as in ``WorkerApproved``.  Facts are pruned; an approval holds until a
#   removal, and an operator's order (suspensions) until it is revoked.
# - batch_results: they stay until they are in files.
# - jobs: a call of a function and what it returned are bytes, which JSON has no form
#   for; such a job has no ``work``.  The texts of a job, compressed, and the facts
#   about it are in the ``packed_`` columns.
# - receipts: they outlive their jobs.
# - usage: by key; usage_by_model: by key, model and node.
# - work_parts: the parts of large works, which are written before their jobs are
#   submitted and deleted after them.  Meanwhile no job claims them.
TABLES = """
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
        ended_at REAL,
        priority INTEGER NOT NULL DEFAULT 1,
        idempotency_key TEXT,
        terms TEXT NOT NULL DEFAULT '{}',
        "user" TEXT NOT NULL DEFAULT '',
        function_call BLOB,
        value BLOB,
        packed_work BLOB,
        packed_outcome BLOB,
        packed_history BLOB
    ) STRICT;
    CREATE INDEX jobs_open ON jobs (submitted_at) WHERE ended_at IS NULL;
    CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
    CREATE UNIQUE INDEX jobs_named ON jobs (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    CREATE INDEX jobs_of_user ON jobs (owner, "user") WHERE "user" <> '';
    CREATE INDEX jobs_of_owner ON jobs (owner, state);
    CREATE INDEX jobs_of_state ON jobs (state);
    CREATE TABLE facts (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        type TEXT NOT NULL,
        job_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX facts_of_job ON facts (job_id, number) WHERE job_id IS NOT NULL;
    CREATE INDEX facts_of_workers ON facts (at) WHERE job_id IS NULL;
    CREATE INDEX worker_facts ON facts (number) WHERE job_id IS NULL;
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
        budget INTEGER,
        priority_max INTEGER NOT NULL DEFAULT 2
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
    CREATE INDEX transfers_from ON transfers (debit);
    CREATE INDEX transfers_to ON transfers (credit);
    CREATE TABLE receipts (
        leaf INTEGER PRIMARY KEY,
        job_id TEXT NOT NULL,
        at REAL NOT NULL,
        body BLOB NOT NULL,
        signature BLOB NOT NULL,
        owner TEXT
    ) STRICT;
    CREATE INDEX receipts_of_job ON receipts (job_id);
    CREATE INDEX receipts_of_owner ON receipts (owner) WHERE owner IS NOT NULL;
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
        "user" TEXT NOT NULL,
        public_key TEXT NOT NULL,
        paired_at REAL NOT NULL,
        PRIMARY KEY (owner, "user", public_key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE pairing_codes (
        code TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        "user" TEXT NOT NULL,
        expires_at REAL NOT NULL,
        public_key TEXT,
        claimed_at REAL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX pairing_codes_of_owner ON pairing_codes (owner, expires_at);
    CREATE INDEX pairing_codes_by_expiry ON pairing_codes (expires_at);
    CREATE TABLE webhook_deliveries (
        job_id TEXT PRIMARY KEY,
        url TEXT NOT NULL,
        secret TEXT NOT NULL,
        host TEXT NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        due_at REAL,
        error TEXT
    ) STRICT;
    CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_at)
        WHERE due_at IS NOT NULL;
    CREATE TABLE suspensions (
        name TEXT PRIMARY KEY,
        how TEXT NOT NULL,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE approvals (
        name TEXT NOT NULL,
        public_key TEXT,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
    CREATE INDEX approvals_of_name ON approvals (name);
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
"""

# They note the places of files and batches that are deleted, and keep the last ones.
DELETION_TRIGGERS = """
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
"""

VERSION_OF_TABLES = 14  # that of 0.2.0, the first release
MIGRATIONS = (
    TABLES,
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
    f"""
    CREATE TABLE deleted_places (
        deletion INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        number INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX deleted_places_by_number ON deleted_places (number);
{DELETION_TRIGGERS}
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
VERSION = VERSION_OF_TABLES + len(MIGRATIONS) - 1
"""The version that all migrations lead to."""


def first_migration(version: int) -> int:
    """Return the index of the first migration that a database needs; 0: it is empty.

    Raises StoreError if a newer Shoal wrote it, or one from before the first release.
    """
    if version > VERSION:
        raise StoreError(
            f"the database has version {version}, this Shoal knows up to "
            f"{VERSION}: install the newer Shoal that wrote it"
        )
    if 0 < version < VERSION_OF_TABLES:
        raise StoreError(
            f"the database has version {version}, from before the first release: this "
            f"Shoal knows {VERSION_OF_TABLES} to {VERSION}"
        )
    return version and version - VERSION_OF_TABLES + 1


def version_problems(version: int) -> list[str]:
    """Return what is wrong if a database has another version than the present one."""
    if version == VERSION:
        return []
    return [
        f"version {version}, expected {VERSION}: `shoal serve` of this version has not "
        "opened it yet, or a newer one has"
    ]
