"""The steps of a run on one rank, each of which counts on all ranks or on none.

Each step has the next samples of the run's order, divided by the speeds of the ranks.
Gradients are added while backward runs; then the ranks exchange what each has done, and
only then the optimizer's step follows.  A rank that is lost before makes the others
repeat the step without it.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.domain.errors import InvalidRequest
from shoal.training.checkpoints import state_tree
from shoal.training.checkpoints.group_checkpoints import GroupCheckpoints
from shoal.training.generations.messages import RankMissing
from shoal.training.group_values import (
    Collectives,
    broadcast_state,
    gather_values,
    name_odd_ranks,
)
from shoal.training.loop.gradient_buckets import GradientBuckets
from shoal.training.loop.plan import (
    Samples,
    Trained,
    TrainingPlan,
    TrainingReport,
    TrainingResult,
)
from shoal.training.loop.samples import (
    RankMeasurement,
    SampleOrder,
    Shares,
    check_sizes,
)
from shoal.training.rank_port import GroupEnded

log = logging.getLogger("shoal.training")


class ReplicasDiffer(GroupEnded):
    """The ranks do not have the same parameters any more; the run ends."""


def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """Return the SHA-256 of the numbers of some tensors."""
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(state_tree.memory_of(each).numpy())
    return digest.digest()


def compare_replicas(
    group: Collectives, digest: bytes, members: Sequence[int], step: int
) -> None:
    """Check that all ranks have the same digest: the same numbers in some tensors.

    Raises ReplicasDiffer on all ranks, which names those that differ from most.
    """
    own = np.frombuffer(digest, np.uint8)
    found = [row.tobytes() for row in group.all_gather(own)]
    if len(found) != len(members):
        return  # a rank was lost, and the next step shows who is left
    if reason := name_odd_ranks(dict(zip(members, found, strict=True))):
        raise ReplicasDiffer(f"the replicas differ after step {step}: {reason}")


def agree_on_buffers(group: Collectives, buffers: Iterable[Tensor]) -> None:
    """Give all ranks the same buffers: means of floats, and the largest of others.

    Buffers, such as the statistics of BatchNorm, come from each rank's own samples.
    """
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for each in buffers:
        if each.numel():
            kinds[each.is_floating_point()].append(each)
    for is_float, some in kinds.items():
        if not some:
            continue
        dtype = torch.float64 if is_float else torch.int64
        row = torch.cat([each.detach().cpu().reshape(-1).to(dtype) for each in some])
        group.all_reduce(row.numpy(), "mean" if is_float else "max")
        for each, part in zip(
            some, row.split([each.numel() for each in some]), strict=True
        ):
            each.copy_(part.view(each.shape))


class _Row(NamedTuple):
    """The message of a rank to the others after its part of a step.

    ``generation`` and ``size`` are those of the group in which it began.
    """

    generation: float
    size: float
    loss: float  # the sum over its samples
    samples: float
    seconds: float
    lent: float
    waiting: float  # ranks that want to join


class TrainingLoop:
    """The steps of a run on one rank."""

    def __init__(
        self,
        trained: Trained,
        samples: Samples,
        plan: TrainingPlan,
        group: Collectives,
        buckets: GradientBuckets,
        checkpoints: GroupCheckpoints | None,
        lent: Callable[[], float],
        on_digest: Callable[[int, bytes], object],
    ) -> None:
        length = len(samples.dataset)
        check_sizes(length, plan.batch, group.place.size)
        self._trained = trained
        self._samples = samples
        self._plan = plan
        self._group = group
        self._buckets = buckets
        self._checkpoints = checkpoints
        self._lent = lent
        self._on_digest = on_digest
        self._order = SampleOrder(length, plan.batch, plan.seed)
        self._shares = Shares(members_of(group))
        self._step = 0
        self._skipped = 0
        self._sent = 0
        self._loss = math.nan
        self._saved = -1  # the step of the last checkpoint
        self._remarks: list[str] = []
        self._generation = group.generation

    def run(self, on_step: Callable[[TrainingReport], object]) -> TrainingResult:
        """Train until the plan is done."""
        if getattr(self._group, "is_new", False):
            self._receive_state()
        else:
            self._check_agreement()
            self._begin()
        while not self._is_done:
            began = perf_counter()
            rows = self._attempt()
            if rows is None:
                log.info("step repeated step=%d", self._step + 1)
                self._buckets.forget_left_out()
                continue
            self._count(rows)
            report = self._report(rows, perf_counter() - began)
            on_step(report)
            self._between_steps(rows)
        self._compare()
        if self._checkpoints is not None and self._saved != self._step:
            self._save()
        agree_on_buffers(self._group, self._trained.model.buffers())
        return TrainingResult(self._step, self._order.epoch, self._loss, self._skipped)

    @property
    def _is_done(self) -> bool:
        if self._plan.steps is not None:
            return self._step >= self._plan.steps
        return self._order.epoch >= self._plan.epochs

    def _check_agreement(self) -> None:
        """Raise InvalidRequest, on all ranks, if they train different things."""
        outline = [
            [name, str(each.dtype), list(each.shape)]
            for name, each in self._trained.model.named_parameters()
        ]
        own = [outline, len(self._samples.dataset), self._plan.batch, self._plan.seed]
        found = gather_values(self._group, own)
        for rank, each in enumerate(found):
            for what, mine, first in zip(
                ("another model", "another data set", "other batches", "another seed"),
                each,
                found[0],
                strict=True,
            ):
                if mine != first:
                    shown = (
                        "" if mine is each[0] else f": {mine}, and rank 0 has {first}"
                    )
                    raise InvalidRequest(f"rank {rank} has {what} than rank 0{shown}")

    def _begin(self) -> None:
        """Continue from a checkpoint, or with the parameters of rank 0."""
        found = self._checkpoints and self._checkpoints.load_latest()
        if not found:
            self._begin_alike()
            return
        rank, size = self._group.place
        self._restore(found.state)
        self._saved = self._step
        if len(found.ranks) == size:
            state_tree.set_random_state(found.ranks[rank])
        else:
            self._remarks.append(
                f"continued from step {self._step} with {size} ranks instead of "
                f"{len(found.ranks)}: other random numbers"
            )
            self._draw_anew()

    def _begin_alike(self) -> None:
        """Begin with the state of rank 0; if that is lost, of the next one."""
        while True:
            state = self._trained.state() if self._group.place.rank == 0 else {}
            try:
                self._trained.restore(broadcast_state(self._group, state, 0))
                return
            except RankMissing:
                continue

    def _attempt(self) -> list[_Row] | None:
        """Make the next step up to the gradients; None: it does not count.

        That is so if a rank was lost meanwhile, and all ranks find the same.
        """
        group = self._group
        (rank, size), generation = group.place, group.generation
        self._shares.regroup(members_of(group))
        group.set_step(self._step + 1)
        counts = self._shares.of(self._order.next_size)
        own = self._order.part(counts, rank)
        began = perf_counter()
        self._buckets.begin()
        loss = self._backward(own)
        seconds = perf_counter() - began
        self._buckets.finish()
        row = _Row(
            *(generation, size, loss, len(own), seconds, self._lent()),
            getattr(group, "waiting", 0),
        )
        rows = _gather_rows(group, row)
        began_in = {(each.generation, each.size) for each in rows}
        return rows if len(began_in) == 1 and len(rows) == rows[0].size else None

    def _backward(self, indices: Sequence[int]) -> float:
        """Add the gradients of some samples; return the sum of their losses."""
        dataset, collate, loss_of = self._samples
        most = self._plan.micro_batch or len(indices)
        total = 0.0
        for begin in range(0, len(indices), most or 1):
            part = indices[begin : begin + most]
            loss = loss_of(self._trained.model, collate([dataset[at] for at in part]))
            if begin + most >= len(indices):
                self._buckets.expect_last()
            # The sum over samples: it is divided by those of all ranks.
            (loss * len(part)).backward()
            total += float(loss.detach()) * len(part)
        return total

    def _count(self, rows: Sequence[_Row]) -> None:
        """Make the step that all ranks have the gradients of."""
        samples = sum(each.samples for each in rows)
        self._loss = sum(each.loss for each in rows) / samples
        self._step += 1
        self._sent += _sent_by_ring(self._buckets.size, len(rows))
        if self._buckets.are_finite():
            trained, clip = self._trained, self._plan.clip
            self._buckets.set_means(samples)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained.model.parameters(), clip)
            trained.optimizer.step()
            if trained.scheduler is not None:
                trained.scheduler.step()
        else:
            self._skipped += 1
            self._buckets.forget_left_out()  # it is not finite either
            odd = [at for at, each in enumerate(rows) if not math.isfinite(each.loss)]
            of = f" of ranks {odd}" if odd else ""
            self._remarks.append(f"skipped: the gradient{of} was not finite")
            log.warning("step skipped step=%d ranks=%s", self._step, odd)
        self._order.advance()
        self._shares.record(
            [
                RankMeasurement(int(each.samples), each.seconds, each.lent)
                for each in rows
            ]
        )

    def _report(self, rows: Sequence[_Row], seconds: float) -> TrainingReport:
        group, plan = self._group, self._plan
        remarks, self._remarks = self._remarks, []
        if group.generation != self._generation:
            self._generation = group.generation
            remarks += getattr(group, "story", ())
        own = rows[min(group.place.rank, len(rows) - 1)].seconds
        of = plan.steps or plan.epochs * self._order.steps_of_epoch
        return TrainingReport(
            self._step,
            self._order.epoch,
            min(1.0, self._step / of) if of else 1.0,
            self._loss,
            int(sum(each.samples for each in rows)),
            seconds,
            max(0.0, 1 - own / seconds) if seconds > 0 else 0.0,
            self._sent,
            [int(each.samples) for each in rows],
            [each.samples / each.seconds if each.seconds else 0.0 for each in rows],
            group.generation,
            self._skipped,
            remarks,
        )

    def _between_steps(self, rows: Sequence[_Row]) -> None:
        """Do what is due after a step, which is the same on all ranks."""
        plan = self._plan
        if (self._order.at_beginning or self._shares.due) and not plan.equal_shares:
            self._shares.adapt(plan.batch)
        if plan.compare_every and self._step % plan.compare_every == 0:
            self._compare()
        every = plan.checkpoint_every
        if self._checkpoints is not None and every and self._step % every == 0:
            self._save()
        if any(each.waiting for each in rows):
            self._admit()

    def _admit(self) -> None:
        """Let ranks in that wait, and give them the state."""
        group: Any = self._group  # it has these where ranks can wait
        if group.admit():
            # If the root is lost, new ranks end: all others have the state.
            with suppress(RankMissing):
                broadcast_state(group, self._state(), group.newest)

    def _compare(self) -> None:
        digest = digest_of(self._trained.model.parameters())
        self._on_digest(self._step, digest)  # before an error, which it explains
        compare_replicas(self._group, digest, members_of(self._group), self._step)

    def _save(self) -> None:
        assert self._checkpoints is not None
        agree_on_buffers(self._group, self._trained.model.buffers())
        saved = self._checkpoints.save(
            self._step, self._state(), state_tree.random_state()
        )
        self._saved = self._step
        self._remarks += [f"checkpoint failed: {each}" for each in saved.errors]

    def _state(self) -> dict[str, Any]:
        loop = {
            "step": self._step,
            "skipped": self._skipped,
            "order": self._order.state(),
            "shares": self._shares.state(),
        }
        return {**self._trained.state(), "loop": loop}

    def _restore(self, state: dict[str, Any]) -> None:
        self._trained.restore(state)
        loop = state["loop"]
        self._step, self._skipped = loop["step"], loop["skipped"]
        self._order.restore(loop["order"])
        self._shares.restore(loop["shares"])

    def _receive_state(self) -> None:
        """Join ranks that train already."""
        group: Any = self._group
        self._restore(broadcast_state(group, {}, group.newest))
        self._draw_anew()

    def _draw_anew(self) -> None:
        """Seed the random numbers, differently on each rank."""
        member = members_of(self._group)[self._group.place.rank]
        state_tree.draw_anew(self._plan.seed, self._step, member)


def members_of(group: Collectives) -> Sequence[int]:
    """Return the names of the ranks, which they keep when others are lost."""
    return getattr(group, "gang_ranks", range(group.place.size))


def _gather_rows(group: Collectives, row: _Row) -> list[_Row]:
    found = group.all_gather(np.array(row, np.float64))
    return [_Row(*(float(each) for each in some)) for some in found]


def _sent_by_ring(size: int, ranks: int) -> int:
    """Return the bytes that each rank of a ring sends to add up arrays."""
    return 2 * (ranks - 1) * size // ranks
