"""Explains a job's history in plain lines, from its recorded facts alone."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Protocol

from shoal.domain import facts
from shoal.domain.job import Job
from shoal.domain.money import dollars
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import Verdict
from shoal.domain.work import describe_target


class TimedFact(Protocol):
    """A fact and when it was recorded, in Unix seconds."""

    @property
    def at(self) -> float: ...

    @property
    def fact(self) -> facts.Fact: ...


def explain(history: Iterable[TimedFact]) -> list[str]:
    """Return a job's history in plain lines, each with its time, in UTC.

    Names workers and models; quotes no prompts and no answers.
    """
    return [
        f"{_time(recorded.at)}  {line}"
        for recorded in history
        for line in _describe(recorded.fact)
    ]


def explain_fact(fact: facts.Fact) -> str:
    """Return the first line about a fact, without its time."""
    return next(_describe(fact))


def explain_remark(at: float, text: str) -> str:
    """Return a line as ``explain`` does, for other events; ``at`` is Unix time."""
    return f"{_time(at)}  {text}"


def _time(at: float) -> str:
    moment = datetime.fromtimestamp(at, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{moment.microsecond // 1000:03d}"


def _describe(fact: facts.Fact) -> Iterator[str]:
    match fact:
        case facts.JobSubmitted(job):
            yield describe_submission(job)
            for text in job.terms.left_out:
                yield f"  left out: {text}"
        case facts.JobLeased(_, worker_id, lease, reason, passed_over):
            yield f"given to {worker_id}, attempt {lease}: {reason}"
            for group in passed_over:
                yield f"  passed over: {describe_workers(group)}: {group.reason}"
        case facts.JobHedged(_, worker_id, lease, reason):
            yield f"given to {worker_id} as well, attempt {lease}: {reason}"
        case facts.JobUnhedged(_, lease, reason, failed=failed):
            why = f"failed: {reason}" if failed else reason
            yield f"attempt {lease} ended, the other continues: {why}"
        case facts.JobStarted(_, lease):
            yield f"first output of attempt {lease}"
        case facts.JobRequeued(_, lease, reason, None):
            yield f"back in the queue after attempt {lease}: {reason}"
        case facts.JobRequeued(_, lease, reason, refused_by, too_long=True):
            yield f"refused by {refused_by} for its length, back in the queue: {reason}"
        case facts.JobRequeued(_, lease, reason, refused_by, failed=True):
            yield f"failed at {refused_by}, back in the queue: {reason}"
        case facts.JobRequeued(_, lease, reason, refused_by):
            yield f"refused by {refused_by}, back in the queue: {reason}"
        case facts.JobCompleted(_, lease, outcome, verdict):
            yield f"done by attempt {lease}: {_describe_outcome(outcome)}"
            if verdict is not Verdict.UNSIGNED:
                yield f"  receipt: {verdict.value}"
        case facts.JobFailed(_, error):
            yield f"failed: {last_line(error)}"
        case facts.JobCancelled(_, reason):
            yield f"cancelled: {reason}"
        case facts.JobExpired(_, _, error):
            yield f"given up: {error}"
        case facts.LateResult(_, lease, worker_id, what):
            yield (
                f"too late: {worker_id} reported {what!r} for attempt {lease}; "
                "recorded, not delivered"
            )
        case facts.WorkerJoined(worker_id):
            yield f"{worker_id} joined"
        case facts.WorkerLoadChanged(worker_id, condition):
            yield f"{worker_id} {condition.unfit or 'can take jobs'}"
        case facts.MachineCalled(worker_id, _, callers):
            yield f"{worker_id}, which may sleep, called by {', '.join(callers)}"
        case facts.WorkerDraining(worker_id, reason):
            yield f"{worker_id} takes no new jobs: {reason}"
        case facts.WorkerLeft(worker_id, reason):
            yield f"{worker_id} lost: {reason}"
        case facts.WorkerSuspended(name, how, by):
            yield f"{name} {how.value} by {by}"
        case facts.WorkerResumed(name, by):
            yield f"{name} resumed by {by}"
        case facts.WorkerApproved(name, by):
            yield f"{name} approved by {by}"
        case facts.WorkerDisapproved(name, by):
            yield f"{name} no longer approved, by {by}"
        case facts.WorkerDismissed(worker_id, reason):
            yield f"{worker_id} disconnected: {reason}"
        case facts.ReceiptPresented(_, worker_id, verdict):
            yield f"{worker_id} sent a receipt later: {verdict.value}"
        case facts.WorkerMarked(worker_id, points, reason):
            yield f"{worker_id} gets penalty points, {points}: {reason}"
        case facts.WorkerTrusted(owner, user, public_key):
            yield f"{owner}/{user} trusts {public_key}"
        case facts.WorkerDistrusted(owner, user, public_key):
            yield f"{owner}/{user} no longer trusts {public_key}"
        case facts.AccountCredited(account, amount, by):
            yield f"{account} credited with {dollars(amount)} by {by}"
        case facts.AccountLimited(account, budget, by):
            limit = "none" if budget is None else dollars(budget)
            yield f"overdraft limit of {account} set by {by}: {limit}"
        case facts.AliasSet(name, models, by):
            yield f"alias {name} set by {by}: {', '.join(models)}"
        case facts.AliasRemoved(name, by):
            yield f"alias {name} removed by {by}"
        case facts.DeploymentSet(name, by=by):
            yield f"deployment of {name} set by {by}: {describe_deployment(fact)}"
        case facts.DeploymentRemoved(name, by):
            yield f"deployment of {name} removed by {by}"


def describe_deployment(deployment: facts.DeploymentSet) -> str:
    """Describe a deployment in one line."""
    least, most = deployment.replicas, deployment.most
    where = f" on {', '.join(deployment.on)}" if deployment.on else ""
    pinned = ", pinned" if deployment.pinned else ""
    count = f"{least} to {most}" if most else f"{least}"
    one = "replica" if (most or least) == 1 else "replicas"
    group = deployment.exclusive_group
    alone = f", excludes others of {group}" if group else ""
    times = f", {', '.join(deployment.schedule)}" if deployment.schedule else ""
    return f"{count} {one}{where}{pinned}{alone}{times}"


def describe_submission(job: Job) -> str:
    by = f" by {job.owner}" if job.owner else ""
    alias = f", requested as {job.terms.alias}" if job.terms.alias else ""
    return f"submitted{by} for {describe_target(job.work)}{alias}"


def describe_workers(group: facts.PassedOver) -> str:
    names = ", ".join(group.workers)
    others = group.count - len(group.workers)
    if not names:
        return "1 worker" if others == 1 else f"{others} workers"
    more = "1 other" if others == 1 else f"{others} others"
    return f"{names} and {more}" if others > 0 else names


def last_line(error: str) -> str:
    """Return the last line of an error, which in a traceback names the exception."""
    return error.rstrip().rpartition("\n")[2].strip()


def _describe_outcome(outcome: Outcome) -> str:
    if outcome.value:
        return f"it returned a value of {len(outcome.value)} B"
    if outcome.blobs:
        return "it returned a value that is stored in a separate file"
    reason = f"finish reason {outcome.finish_reason}"
    if outcome.usage is None:
        return reason
    read, written = outcome.usage.prompt_tokens, outcome.usage.completion_tokens
    return f"{read} prompt tokens, {written} output tokens, {reason}"
