"""The store: one commit for each batch.

A page of jobs is read from indexes whose entries are in its order, up to where it is
full.  Conditions that no index fits are tested row by row, and few rows: a page may
then be short, or empty, and say where the next one begins.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from shoal.domain.errors import Fenced, NotFound, StoreBroken, WentBack
from shoal.domain.facts import (
    AliasSet,
    DeploymentSet,
    Fact,
    JobSubmitted,
    WorkerApproved,
    WorkerSuspended,
    WorkerTrusted,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Gang, Job, Priority
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, Suspension
from shoal.pool.lifecycle import JobState
from shoal.store import codec, port
from shoal.store.blobs import BlobStore, MemoryBlobs
from shoal.store.ledger import NO_ENTRIES, LedgerEntries
from shoal.store.port import CommitId, Epoch, Writer
from shoal.store.sql.batches import SqlBatches, SqlFiles
from shoal.store.sql.database import (
    Database,
    Sql,
    decode,
    in_steps,
    select,
    select_first,
)
from shoal.store.sql.facts import LargeValues, read_history, write_facts
from shoal.store.sql.keys import SqlKeys, SqlPairing, SqlSignIns
from shoal.store.sql.ledger import SqlLedger, read_usage, write_entries
from shoal.store.sql.pruning import delete_job, prune
from shoal.store.sql.usage import SqlUsage, UsageBatch, UsageDays
from shoal.store.sql.webhooks import SqlWebhooks, write_deliveries
from shoal.store.sql.work_parts import WorkParts, read_work

ROW_NUMBER_MAX = 2**63 - 1

JOB = """SELECT id, kind, owner, state, packed_work, limits, priority,
                idempotency_key, terms, lease, packed_outcome, error,
                submitted_at, ended_at, function_call, value
         FROM jobs"""
SUMMARY = """id, kind, model, owner, priority, terms, state, lease,
             submitted_at, ended_at, error"""


class SqlStore:
    """Stores everything in one database, which one coordinator at a time may use."""

    def __init__(self, database: Database[Any], blobs: BlobStore | None) -> None:
        """Take the database; values too large for a row go to ``blobs``."""
        self.database = database
        self.name = database.name
        self.keys = SqlKeys(database)
        self.ledger = SqlLedger(database)
        self.webhooks = SqlWebhooks(database)
        self.pairing = SqlPairing(database)
        self.sign_ins = SqlSignIns(database)
        self.files = SqlFiles(database)
        self.batches = SqlBatches(database)
        self.usage = SqlUsage(database)
        self._usage_days = UsageDays()
        self._works = WorkParts(database)
        self._large_values = LargeValues(blobs or MemoryBlobs(), self._works)

    async def open(self, *, create: bool = True) -> None:
        await self.database.open(create=create)

    async def take_over(self) -> port.Epoch:
        return await self.database.transact(take_over)

    async def check(self) -> None:
        await self.database.check()

    async def wait_damaged(self) -> StoreBroken:
        return await self.database.wait_damaged()

    async def prepare(self, job: Job) -> None:
        await self._works.prepare(job)

    def discard(self, job_id: JobId) -> None:
        self._works.discard(job_id)

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[port.RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
        commit: port.CommitId | None = None,
    ) -> None:
        recorded = [*earlier, *[port.RecordedFact(at, fact) for fact in facts]]

        def write(sql: Sql) -> int | None:
            if commit is not None and not begin_commit(sql, commit):
                return None
            batch = self._usage_days.begin_batch()
            usage = UsageBatch(sql, self._usage_days, entries.places)
            write_facts(sql, recorded, self._large_values, usage)
            for refund in entries.refunds:
                usage.refund(*refund, at)
            usage.write()
            write_entries(sql, entries, at)
            if entries.deliveries:  # most jobs have no webhook
                write_deliveries(sql, entries.deliveries, at)
            return batch

        for data in codec.large_data_in(recorded):
            # Before the transaction, which holds its session and its rows meanwhile.
            await self.database.run(partial(self._large_values.blobs.keep, data))
        batch = await self.database.transact(write)
        if batch is not None:
            self._usage_days.on_committed(batch)
        for each in recorded:
            if isinstance(each.fact, JobSubmitted):
                self._works.forget(each.fact.job.id)

    async def open_jobs(self) -> list[port.StoredJob]:
        await self._fetch_arguments()
        query = f"{JOB} WHERE ended_at IS NULL ORDER BY submitted_at, rowid"
        # The writer's thread owns the pins of large values.
        return await self.database.transact(
            lambda sql: [self._open_job(sql, row) for row in sql.execute(query)]
        )

    async def ended_members(self, since: float) -> list[tuple[Gang, JobState]]:
        query = """SELECT terms, state FROM jobs
                   WHERE ended_at >= ? AND terms LIKE '%"gang"%'"""

        def read(sql: Sql) -> list[tuple[Gang, JobState]]:
            found = []
            for terms, state in sql.execute(query, (since,)):
                if (gang := codec.decode_terms(terms).gang) is not None:
                    found.append((gang, JobState(state)))
            return found

        return await self.database.read(read)

    async def job(self, job_id: JobId) -> port.StoredJob | None:
        return await self._find_job("id = ?", job_id)

    async def summary(self, job_id: JobId) -> port.StoredJobSummary | None:
        query = f"SELECT {SUMMARY} FROM jobs WHERE id = ?"
        return await self.database.read(select_first(_summary, query, job_id))

    async def recent(
        self,
        wanted: port.JobFilter,
        limit: int,
        examined_max: int = port.JOBS_EXAMINED_MAX,
    ) -> port.StoredJobPage:
        return await self.database.read_list(
            lambda sql: _read_page(sql, wanted, limit, examined_max)
        )

    async def runs(self, job_ids: Sequence[JobId]) -> list[port.JobRun]:
        def read(sql: Sql) -> list[port.JobRun]:
            return [
                port.JobRun(
                    decode(read_history, sql, Job(job_id, port.OMITTED_WORK), None),
                    read_usage(sql, job_id),
                )
                for job_id in job_ids
            ]

        return await self.database.read_list(read)

    async def by_idempotency_key(
        self, owner: str, idempotency_key: str
    ) -> port.StoredJob | None:
        where = "owner = ? AND idempotency_key = ?"
        return await self._find_job(where, owner, idempotency_key)

    async def history(self, job_id: JobId) -> list[port.RecordedFact]:
        def read(sql: Sql) -> list[port.RecordedFact]:
            row = sql.execute(f"{JOB} WHERE id = ?", (job_id,)).fetchone()
            if row is None:
                return []
            stored = decode(_job, sql, row, self._large_values.blobs)
            return decode(read_history, sql, stored.job, stored.outcome)

        return await self.database.read(read)

    async def history_since(self, job_id: JobId, after: int) -> list[port.RecordedFact]:
        job = Job(job_id, port.OMITTED_WORK)
        return await self.database.read(
            lambda sql: decode(read_history, sql, job, None)[after:]
        )

    async def trusted_workers(self) -> list[WorkerTrusted]:
        query = 'SELECT owner, "user", public_key FROM trusted'
        return await self.database.read_list(select(WorkerTrusted, query))

    async def suspensions(self) -> list[tuple[WorkerSuspended, float]]:
        query = "SELECT at, name, how, by FROM suspensions"
        return await self.database.read(
            lambda sql: [
                (WorkerSuspended(name, Suspension(how), by), at)
                for at, name, how, by in sorted(sql.execute(query))
            ]
        )

    async def approvals(self) -> list[WorkerApproved]:
        query = "SELECT name, by, public_key FROM approvals ORDER BY rowid"
        return await self.database.read(select(WorkerApproved, query))

    async def aliases(self) -> list[AliasSet]:
        query = "SELECT name, models, by FROM aliases ORDER BY name"
        return await self.database.read(
            lambda sql: [
                AliasSet(name, msgspec.json.decode(models, type=tuple[str, ...]), by)
                for name, models, by in sql.execute(query)
            ]
        )

    async def deployments(self) -> list[DeploymentSet]:
        query = "SELECT body FROM deployments ORDER BY name"
        return await self.database.read(
            lambda sql: [
                msgspec.json.decode(body, type=DeploymentSet)
                for (body,) in sql.execute(query)
            ]
        )

    async def penalties_since(self, since: float) -> list[port.RecordedFact]:
        query = """SELECT at, body FROM facts
                   WHERE job_id IS NULL AND at >= ? AND type = 'WorkerMarked'
                   ORDER BY at, number"""

        def marked(at: float, body: str) -> port.RecordedFact:
            return port.RecordedFact(at, codec.decode_marked(body))

        return await self.database.read_list(select(marked, query, since))

    async def worker_facts(
        self, limit: int, before: int | None = None, skip: int = 0
    ) -> list[port.NumberedFact]:
        below = ROW_NUMBER_MAX if before is None else before
        query = """SELECT at, type, body, number FROM facts
                   WHERE job_id IS NULL AND number < ?
                   ORDER BY number DESC LIMIT ? OFFSET ?"""

        def numbered(at: float, name: str, body: str, number: int) -> port.NumberedFact:
            return port.NumberedFact(at, codec.decode_worker_fact(name, body), number)

        facts = select(numbered, query, below, limit, skip)
        return await self.database.read_list(facts)

    async def models_since(self, since: float) -> set[str]:
        return await self._offered_since(_models_of, since)

    async def functions_since(self, since: float) -> set[str]:
        return await self._offered_since(lambda offer: offer.tasks, since)

    async def _offered_since(
        self, names_of: Callable[[Offer], Iterable[str]], since: float
    ) -> set[str]:
        """Return names in the offers of workers that joined."""
        query = """SELECT body FROM facts
                   WHERE job_id IS NULL AND at >= ? AND type = 'WorkerJoined'"""
        joined = select(codec.decode_joined, query, since)
        found = await self.database.read_list(joined)
        return {name for each in found for name in names_of(each.offer)}

    async def prune(self, before: float) -> int:
        while await self.database.transact(self._usage_days.add_up):
            pass
        return await prune(self.database, self._works, before)

    async def delete_job(self, job_id: JobId) -> bool:
        found = await self.database.transact(lambda sql: delete_job(sql, job_id))
        if found:
            await self._works.delete(job_id)
        return found

    async def close(self) -> None:
        await self.database.close()

    async def _find_job(self, where: str, *values: object) -> port.StoredJob | None:
        def read(sql: Sql) -> port.StoredJob | None:
            row = sql.execute(f"{JOB} WHERE {where}", values).fetchone()
            if row is None:
                return None
            return decode(_job, sql, row, self._large_values.blobs)

        return await self.database.read(read)

    async def _fetch_arguments(self) -> None:
        """Bring large values of open jobs near: no transaction is to wait for that."""
        query = """SELECT function_call FROM jobs
                   WHERE ended_at IS NULL AND function_call IS NOT NULL"""
        calls = await self.database.read_list(select(codec.large_values_of, query))
        blobs = self._large_values.blobs
        for digest in {digest for call in calls for digest in call}:
            if blobs.has(digest) and not blobs.is_near(digest):
                with suppress(NotFound):  # it is left out below
                    await self.database.run(partial(blobs.read, digest))

    def _open_job(self, sql: Sql, row: tuple[Any, ...]) -> port.StoredJob:
        """Read an open job, and pin its large values until it ends."""
        stored = decode(_job, sql, row, self._large_values.blobs)
        call, _ = row[-2:]
        if call is not None:
            self._large_values.pin(stored.job.id, codec.large_values_of(call))
        return stored


def _models_of(offer: Offer) -> set[str]:
    """Return the models that a worker serves, and those that its machine can load."""
    loadable = () if offer.library is None else offer.library.models
    return {*offer.models, *(each.name for each in loadable)}


def _job(sql: Sql, row: tuple[Any, ...], blobs: BlobStore) -> port.StoredJob:
    id_, kind, owner, state, work, limits, priority, name, terms, *rest = row
    lease, outcome, error, submitted_at, ended_at, call, value = rest
    decoded, texts = codec.decode_work(kind, read_work(sql, id_, work))
    decoded_terms = codec.decode_terms(terms)
    if texts:
        decoded_terms = replace(decoded_terms, **texts)
    if call is not None:
        decoded = codec.decode_call(call, blobs)
    assert decoded is not None, "every job has work"
    return port.StoredJob(
        Job(
            JobId(id_),
            decoded,
            codec.decode_limits(limits),
            owner,
            Priority(priority),
            idempotency_key=name or "",
            terms=decoded_terms,
        ),
        JobState(state),
        LeaseNumber(lease),
        submitted_at,
        ended_at,
        codec.decode_outcome(outcome, value) if outcome else None,
        error,
    )


def _read_page(
    sql: Sql, wanted: port.JobFilter, limit: int, examined_max: int
) -> port.StoredJobPage:
    """Read a page after testing at most ``examined_max`` jobs, or ``limit``."""
    examined_max = max(examined_max, limit)
    before = ROW_NUMBER_MAX
    if isinstance(wanted.before, int):
        before = wanted.before
    elif wanted.before is not None:
        query = "SELECT rowid FROM jobs WHERE id = ?"
        row = sql.execute(query, (wanted.before,)).fetchone()
        if row is None:
            return port.StoredJobPage([], None)
        (before,) = row
    states = {state.value for state in wanted.states}
    found: list[port.StoredJobSummary] = []
    text = wanted.text.casefold()
    last, examined = None, 0
    for number, user, *row in islice(_candidates(sql, wanted, before), examined_max):
        last = number
        id_, kind, model, owner, _, _, state, *_ = row
        examined += 1
        if (
            (wanted.user is None or user == wanted.user)
            and (wanted.kind is None or kind == wanted.kind.value)
            and (not states or state in states)
            and (
                not text or any(text in each.casefold() for each in (id_, model, owner))
            )
        ):
            found.append(decode(_summary, *row))
            if len(found) == limit:
                break
    is_last = len(found) < limit and examined < examined_max
    return port.StoredJobPage(found, None if is_last else last)


def _candidates(sql: Sql, wanted: port.JobFilter, before: int) -> Iterator[Any]:
    """Yield rows from the indexes that fit a filter best, the newest first."""
    states = [state.value for state in wanted.states or JobState]
    ranges: list[tuple[str, tuple[object, ...]]]
    query = "SELECT 1 FROM jobs WHERE id = ?"
    if wanted.text and sql.execute(query, (wanted.text,)).fetchone():
        ranges = [("id = ? AND", (wanted.text,))]  # not looked for among a million
    elif wanted.owner is not None and wanted.user:
        # The index has the jobs with a user only.
        where = """owner = ? AND "user" = ? AND "user" <> '' AND"""
        ranges = [(where, (wanted.owner, wanted.user))]
    elif wanted.owner is not None:
        ranges = [("owner = ? AND state = ? AND", (wanted.owner, s)) for s in states]
    elif wanted.states:
        ranges = [("state = ? AND", (state,)) for state in states]
    else:
        ranges = [("", ())]
    query = """SELECT rowid, "user", {} FROM jobs
               WHERE {} rowid < ? ORDER BY rowid DESC"""
    rows = (
        in_steps(sql, query.format(SUMMARY, where), *values, before)
        for where, values in ranges
    )
    return heapq.merge(*rows, key=lambda row: row[0], reverse=True)


def _summary(*row: Any) -> port.StoredJobSummary:
    id_, kind, model, owner, priority, stored, state, lease, *rest = row
    return port.StoredJobSummary(
        JobId(id_),
        JobKind(kind),
        model,
        owner,
        Priority(priority),
        codec.decode_terms(stored),
        JobState(state),
        LeaseNumber(lease),
        *rest,
    )


def take_over(sql: Sql) -> Epoch:
    """Begin an epoch, in which no writer has made a commit."""
    query = """UPDATE writers SET epoch = epoch + 1, number = 0 WHERE name = ?
               RETURNING epoch"""
    for writer in get_args(Writer):
        ((epoch,),) = sql.execute(query, (writer,)).fetchall()
    return Epoch(epoch)  # the same of all writers


def begin_commit(sql: Sql, commit: CommitId) -> bool:
    """Count a commit in the open transaction; return False if it was made before.

    A commit moves its writer's row on by one.  Any other row says what has happened:
    the commit was made before, another coordinator has taken over, or the database is
    an older copy.

    Raises Fenced or WentBack, as ``Store.append`` does.
    """
    epoch, writer, number = commit
    query = """UPDATE writers SET number = number + 1
               WHERE name = ? AND epoch = ? AND number = ?"""
    if sql.execute(query, (writer, epoch, number - 1)).rowcount:
        return True
    query = "SELECT epoch, number FROM writers WHERE name = ?"
    ((present, last),) = sql.execute(query, (writer,))
    if present > epoch:
        raise Fenced(
            f"another coordinator has taken over the database (epoch {present}; here "
            f"{epoch}): this one stops; run only one on a data folder"
        )
    if (present, last) < (epoch, number):
        went_back = "the database went back to"
        if present < epoch:
            went_back += f" epoch {present}, before epoch {epoch}"
        else:
            went_back += f" commit {last} of the {writer}, before commit {number}"
        raise WentBack(f"{went_back}: it is an older copy")
    return False
