"""Writes facts, and the changes they make to jobs, to the store.

The facts about a job are in its row, and from some length on in rows of their own.
Most jobs have a few facts, which a compressed row holds in a tenth of the space of rows
of their own.  Appending rewrites the row, so only a limited number is appended.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec.structs import astuple

from shoal.domain import facts
from shoal.domain.errors import StoreError
from shoal.domain.facts import FACT_NAMES, Fact
from shoal.domain.ids import JobId, peer_of
from shoal.domain.job import Job, Priority
from shoal.domain.outcome import Outcome
from shoal.domain.work import Call, JobKind
from shoal.pool.lifecycle import TRANSITIONS, JobState
from shoal.store import codec
from shoal.store.blobs import BlobStore
from shoal.store.packing import pack, unpack
from shoal.store.port import RecordedFact, listed_model
from shoal.store.sql.database import AMONG, Sql, Texts
from shoal.store.sql.ledger import write_limit
from shoal.store.sql.usage import UsageBatch
from shoal.store.sql.work_parts import WorkParts

HISTORY_MAX = 4 << 10  # bytes in a job's row from which on nothing is appended

StoredHistory: TypeAlias = tuple[bytes, float | None]  # and the job's end
FactRow: TypeAlias = tuple[float, str, JobId | None, str]

INSERT_FACT = "INSERT INTO facts (at, type, job_id, body) VALUES (?, ?, ?, ?)"


@dataclass(slots=True)
class LargeValues:
    """Large works, the blob store, and the values that open jobs pin there."""

    blobs: BlobStore
    works: WorkParts
    _pinned: dict[JobId, tuple[bytes, ...]] = field(default_factory=dict)

    def pin(self, job_id: JobId, digests: tuple[bytes, ...]) -> None:
        """Pin values until the job ends."""
        if digests:
            self._pinned[job_id] = digests
            for digest in digests:
                self.blobs.pin(digest)

    def unpin(self, job_id: JobId) -> None:
        """Unpin the values of a job that has ended."""
        for digest in self._pinned.pop(job_id, ()):
            self.blobs.unpin(digest)


STATE_AFTER: Mapping[type[Fact], str] = {
    facts.JobSubmitted: JobState.QUEUED.value,
    **{
        fact: state.value
        for facts in TRANSITIONS.values()
        for fact, state in facts.items()
    },
}


def write_facts(
    sql: Sql, recorded: Iterable[RecordedFact], apart: LargeValues, usage: UsageBatch
) -> None:
    """Write facts and the changes they make, in the open transaction.

    The ends of jobs are added to ``usage``, which the caller writes.

    Raises StoreError for a fact about an unknown job.
    """
    changes = _FactBatch(sql, apart, usage)
    for each in recorded:
        changes.add(each)
    changes.write()


class _RowChange(msgspec.Struct):
    """The changes to a job's row; None leaves a column unchanged."""

    new: tuple[object, ...] | None = None  # the columns that never change
    facts: list[RecordedFact] = msgspec.field(default_factory=list)
    # The columns that change, in the order in which they are written.
    state: str | None = None
    lease: int | None = None
    history: bytes | None = None
    outcome: bytes | None = None
    value: bytes | None = None
    error: str | None = None
    ended_at: float | None = None


@dataclass(slots=True)
class _FactBatch:
    """The changes of one batch of facts; each row is written once.

    A short job usually has several facts in one batch.
    """

    sql: Sql
    apart: LargeValues
    usage: UsageBatch
    _rows: dict[JobId, _RowChange] = field(default_factory=dict)
    _named: dict[tuple[str, str], _RowChange] = field(default_factory=dict)
    _used: list[tuple[JobId, Outcome | int, float]] = field(default_factory=list)
    _facts: list[FactRow] = field(default_factory=list)  # about no job

    def add(self, recorded: RecordedFact) -> None:
        """Collect the changes of a fact."""
        fact, at = recorded.fact, recorded.at
        if isinstance(fact, facts.JobFact):
            change = self._change(fact, at)
            change.facts.append(recorded)
            change.state = STATE_AFTER[type(fact)]
        elif isinstance(fact, facts.LateResult | facts.ReceiptPresented):
            # A pruned job has no history to read.
            if self._knows(fact.job_id):
                self._row(fact.job_id).facts.append(recorded)
        elif not isinstance(fact, facts.WorkerLoadChanged):  # which is not stored
            self._write_order(fact, at)
            self._facts.append(fact_row(recorded, None))

    def _change(self, fact: facts.JobFact, at: float) -> _RowChange:
        """Return the changes to a job's row, with those of the fact."""
        match fact:
            case facts.JobSubmitted(job):
                change = _RowChange(self._columns(job, at))
                self._rows[job.id] = change
                self._named[job.owner, job.idempotency_key] = change
            case facts.JobLeased(job_id, _, lease) | facts.JobHedged(job_id, _, lease):
                change = self._row(job_id)
                change.lease = lease
            case facts.JobStarted() | facts.JobRequeued() | facts.JobUnhedged():
                change = self._row(fact.job_id)
            case facts.JobCompleted(job_id, _, outcome):
                change = self._end(job_id, at)
                change.outcome, change.value = codec.encode_outcome(
                    outcome, self.apart.blobs
                )
                self._used.append((job_id, outcome, at))
            case facts.JobFailed(job_id=job_id, error=error):
                change = self._end(job_id, at)
                change.error = error
            case facts.JobExpired(job_id, _, error, written):
                change = self._end(job_id, at)
                change.error = error
                self._used.append((job_id, written, at))
            case facts.JobCancelled(job_id, reason, written):
                change = self._end(job_id, at)
                change.error = reason
                self._used.append((job_id, written, at))
        return change

    def _write_order(
        self,
        fact: facts.WorkerFact | facts.AccountFact | facts.ModelFact,
        at: float,
    ) -> None:
        """Write what outlives the row of a fact that is about no job."""
        match fact:
            case facts.WorkerTrusted(owner, user, public_key):
                query = "INSERT INTO trusted VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
                self.sql.execute(query, (owner, user, public_key, at))
            case facts.WorkerDistrusted(owner, user, public_key):
                pair = 'owner = ? AND "user" = ? AND public_key = ?'
                # A worker presents its code at each start: it must not pair it again.
                for table in ("trusted", "pairing_codes"):
                    query = f"DELETE FROM {table} WHERE {pair}"
                    self.sql.execute(query, (owner, user, public_key))
            case facts.WorkerSuspended(name, how, by):
                query = """INSERT INTO suspensions VALUES (?, ?, ?, ?)
                           ON CONFLICT (name) DO UPDATE SET how = excluded.how,
                               by = excluded.by, at = excluded.at"""
                self.sql.execute(query, (name, how.value, by, at))
            case facts.WorkerResumed(name):
                # Of a worker, or of a machine and all its workers.
                suspended = self.sql.execute("SELECT name FROM suspensions")
                resumed = [
                    (each,)
                    for (each,) in suspended.fetchall()
                    if name in (each, peer_of(each))
                ]
                query = "DELETE FROM suspensions WHERE name = ?"
                self.sql.executemany(query, resumed)
            case facts.WorkerApproved(name, by, public_key):
                # It replaces one that waited for a worker.
                query = """DELETE FROM approvals
                           WHERE name = ? AND (public_key IS NULL OR public_key = ?)"""
                self.sql.execute(query, (name, public_key))
                query = "INSERT INTO approvals VALUES (?, ?, ?, ?)"
                self.sql.execute(query, (name, public_key, by, at))
            case facts.WorkerDisapproved(name, _, public_key):
                query = """DELETE FROM approvals
                           WHERE name = ?1 AND (public_key = ?2
                               OR (public_key IS NULL AND ?2 IS NULL))"""
                self.sql.execute(query, (name, public_key))
            case facts.AliasSet(name, models, by):
                query = """INSERT INTO aliases VALUES (?, ?, ?, ?)
                           ON CONFLICT (name) DO UPDATE SET models = excluded.models,
                               by = excluded.by, at = excluded.at"""
                texts = msgspec.json.encode(models).decode()
                self.sql.execute(query, (name, texts, by, at))
            case facts.AliasRemoved(name):
                self.sql.execute("DELETE FROM aliases WHERE name = ?", (name,))
            case facts.DeploymentSet(name):
                query = """INSERT INTO deployments VALUES (?, ?)
                           ON CONFLICT (name) DO UPDATE SET body = excluded.body"""
                self.sql.execute(query, (name, msgspec.json.encode(fact).decode()))
            case facts.DeploymentRemoved(name):
                self.sql.execute("DELETE FROM deployments WHERE name = ?", (name,))
            case facts.AccountLimited():
                write_limit(self.sql, fact)
            case (
                facts.WorkerJoined()
                | facts.WorkerDraining()
                | facts.WorkerLeft()
                | facts.MachineCalled()
                | facts.WorkerDismissed()
                | facts.WorkerMarked()
                | facts.WorkerLoadChanged()
                | facts.AccountCredited()
            ):
                pass

    def write(self) -> None:
        """Write the collected changes.  Raises StoreError if a job is unknown."""
        stored = self._stored_histories()
        new: list[tuple[object, ...]] = []
        under_way: list[tuple[object, ...]] = []
        over: list[tuple[object, ...]] = []
        for job_id, change in self._rows.items():
            ended = change.ended_at is not None
            if change.new is not None:
                change.history = begin_history(change.facts, ended=ended)
                new.append((job_id, *change.new, *astuple(change)[CHANGING:]))
                continue
            if job_id not in stored:
                raise StoreError(f"there is no job {job_id}")
            change.history = extend_history(
                self.sql, job_id, stored[job_id], change.facts, ending=ended
            )
            if ended:
                over.append((*astuple(change)[CHANGING:], job_id))
            else:
                under_way.append((change.state, change.lease, change.history, job_id))
        self.sql.executemany(INSERT, new)
        self.sql.executemany(PROGRESS, under_way)
        self.sql.executemany(END, over)
        if self._used:
            self.usage.add(self._used)
        self.sql.executemany(INSERT_FACT, self._facts)

    def _stored_histories(self) -> dict[JobId, StoredHistory]:
        """Read the histories of the jobs that are not new, all at once."""
        changed = Texts([id_ for id_, each in self._rows.items() if each.new is None])
        if not changed:
            return {}
        query = f"SELECT id, packed_history, ended_at FROM jobs WHERE {AMONG}"
        rows = self.sql.execute(query, (changed,))
        return {id_: (packed, ended_at) for id_, packed, ended_at in rows}

    def _row(self, job_id: JobId) -> _RowChange:
        change = self._rows.get(job_id)
        if change is None:
            change = self._rows[job_id] = _RowChange()
        return change

    def _end(self, job_id: JobId, at: float) -> _RowChange:
        self.apart.unpin(job_id)
        change = self._row(job_id)
        change.ended_at = at
        return change

    def _knows(self, job_id: JobId) -> bool:
        if job_id in self._rows:
            return True
        known = self.sql.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,))
        return known.fetchone() is not None

    def _columns(self, job: Job, at: float) -> tuple[object, ...]:
        """Return the columns that never change, and release the idempotency key."""
        name = job.idempotency_key or None
        call = None
        if isinstance(job.work, Call):
            call, digests = codec.encode_call(job.work, self.apart.blobs)
            self.apart.pin(job.id, digests)
        if name is not None:
            self._free(job.owner, name)
        return (
            _KINDS[job.kind],
            listed_model(job),
            job.owner,
            self.apart.works.submit(self.sql, job),
            codec.encode_limits(job.limits),
            _PRIORITIES[job.priority],
            name,
            codec.encode_terms(job.terms),
            job.terms.user,
            at,
            call,
        )

    def _free(self, owner: str, name: str) -> None:
        """Remove an idempotency key from the failed job that has it."""
        self.sql.execute(
            "UPDATE jobs SET idempotency_key = NULL"
            " WHERE owner = ? AND idempotency_key = ?",
            (owner, name),
        )
        earlier = self._named.get((owner, name))
        if earlier is not None and earlier.new is not None:
            before, after = earlier.new[:NAME], earlier.new[NAME + 1 :]
            earlier.new = (*before, None, *after)


INSERT = """
    INSERT INTO jobs (id, kind, model, owner, work, packed_work, limits, priority,
                      idempotency_key, terms, "user", submitted_at, function_call,
                      state, lease, packed_history, packed_outcome, value, error,
                      ended_at)
    VALUES (?, ?, ?, ?, '', ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(?, 0), ?, ?, ?, ?, ?)"""
_KINDS = {each: each.value for each in JobKind}
_PRIORITIES = {each: each.value for each in Priority}
NAME = 6  # its index in the result of ``_columns``
CHANGING = 2  # the first of the fields of ``_RowChange`` that are columns which change
PROGRESS = """
    UPDATE jobs SET state = coalesce(?, state), lease = coalesce(?, lease),
                    packed_history = ? WHERE id = ?"""
END = """
    UPDATE jobs SET state = ?, lease = coalesce(?, lease), packed_history = ?,
                    packed_outcome = ?, value = ?, error = ?, ended_at = ?
    WHERE id = ?"""


def begin_history(recorded: Sequence[RecordedFact], *, ended: bool) -> bytes:
    """Return the history of a new job for its row.  Only what stays is compressed."""
    lines = codec.encode_history(recorded)
    return pack(lines) if ended else lines


def extend_history(
    sql: Sql,
    job_id: JobId,
    stored: StoredHistory,
    recorded: Sequence[RecordedFact],
    *,
    ending: bool,
) -> bytes:
    """Return the history of a stored job for its row.

    Writes the facts that do not go there.
    """
    packed, ended_at = stored
    lines = unpack(packed)
    if len(lines) >= HISTORY_MAX:
        sql.executemany(INSERT_FACT, [fact_row(each, job_id) for each in recorded])
    else:
        lines += codec.encode_history(recorded)
    return pack(lines) if ending or ended_at is not None else lines


def fact_row(recorded: RecordedFact, job_id: JobId | None) -> FactRow:
    """Return the row of its own of a fact."""
    fact = recorded.fact
    return recorded.at, FACT_NAMES[type(fact)], job_id, codec.encode_fact(fact)


def read_history(sql: Sql, job: Job, outcome: Outcome | None) -> list[RecordedFact]:
    """Read the facts about a job, in order."""
    query = "SELECT packed_history FROM jobs WHERE id = ?"
    (packed,) = sql.execute(query, (job.id,)).fetchone() or (None,)
    found = codec.decode_history(unpack(packed or b""), job, outcome)
    query = "SELECT at, type, body FROM facts WHERE job_id = ? ORDER BY number"
    return found + [
        RecordedFact(at, codec.decode_fact(name, body, job, outcome))
        for at, name, body in sql.execute(query, (job.id,))
    ]
