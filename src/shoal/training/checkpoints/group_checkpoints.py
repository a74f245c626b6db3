"""Checkpoints of a group of ranks: each writes its part, and all agree on the result.

Ranks that see the same folder make one checkpoint of it together.  A rank with a disk
of its own writes a whole one there, so that any machine can start the others again.
"""

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.training.checkpoints.folder import (
    INCOMING,
    MARK,
    PIECE_MAX,
    CheckpointFolder,
    Piece,
    PlannedState,
    State,
    TrainingCheckpoint,
    write_pieces,
)
from shoal.training.generations.messages import RankMissing
from shoal.training.group_values import (
    Collectives,
    broadcast_state,
    broadcast_value,
    gather_values,
)

log = logging.getLogger("shoal.training")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The outcome of a checkpoint; ``errors`` are by rank, and empty on success."""

    step: int
    folders: int  # in which it is whole
    errors: Sequence[str]


class _GroupChanged(Exception):
    """A rank was lost meanwhile: all ranks that are left know, and begin again."""


class GroupCheckpoints:
    """The checkpoints of a run; all ranks call the same methods, in the same order.

    Methods raise what the collectives of the group raise.
    """

    def __init__(
        self, path: Path, group: Collectives, keep: int = 3, piece_max: int = PIECE_MAX
    ) -> None:
        self._folder = CheckpointFolder(path, keep)
        self._group = group
        self._piece_max = piece_max
        self._began_in = (0, 0)  # the generation, and its size

    def save(self, step: int, state: State, own: Any = None) -> SavedCheckpoint:
        """Write the state, which is the same in all ranks; return what became of it.

        ``own`` is what only this rank has, as JSON.  A disk that is full or fails is
        not an error here: what was saved before stays, and training goes on.  If a rank
        is lost meanwhile, those that are left begin again.

        Raises InvalidRequest for values that are not written.
        """
        planned = PlannedState.of(state, self._piece_max)
        while True:
            self._begin()
            try:
                return self._save(step, planned, own)
            except _GroupChanged:
                log.info("checkpoint begins again step=%d", step)

    def load_latest(self) -> TrainingCheckpoint | None:
        """Return the last checkpoint that any rank has whole, to all; None: no rank.

        Those that have it read it from their disk, unless others lack it.
        """
        own = self._load_own()
        while True:
            self._begin()
            try:
                return self._load(own)
            except (_GroupChanged, RankMissing):
                continue

    def _load_own(self) -> TrainingCheckpoint | None:
        """Return the last checkpoint in this rank's folder.

        The ranks read file by file, as the time limit of the group is that of one
        operation, and their folders differ.
        """
        loading = self._folder.loading_latest()
        own: TrainingCheckpoint | None = None
        is_done = False
        while not all(gather_values(self._group, is_done)):
            if not is_done:
                try:
                    next(loading)
                except StopIteration as ended:
                    own, is_done = ended.value, True
        return own

    def _load(self, own: TrainingCheckpoint | None) -> TrainingCheckpoint | None:
        found = self._gather(own and [own.step, own.digest])
        steps = [each[0] for each in found if each]
        if not steps:
            return None
        root = next(
            at for at, each in enumerate(found) if each and each[0] == max(steps)
        )
        if all(each == found[root] for each in found):
            return own
        step, digest = found[root]
        state = broadcast_state(self._group, own.state if own else {}, root)
        ranks = broadcast_value(self._group, own.ranks if own else (), root)
        if self._group.place.rank != root:
            log.info("checkpoint received step=%d from=%d", step, root)
        return TrainingCheckpoint(step, state, ranks, digest)

    def _save(self, step: int, planned: PlannedState, own: Any) -> SavedCheckpoint:
        rank = self._group.place.rank
        writers, error, ranks = self._find_writers(own)
        leader = writers[0]
        incoming = self._folder.path / f"{INCOMING}{step}-{leader}"
        if rank == leader and not error:
            error = self._attempt(lambda: self._folder.begin(f"{step}-{leader}"))
        begun = self._gather(error)
        error, files = self._write(
            incoming,
            planned,
            []
            if begun[leader]
            else planned.pieces[writers.index(rank) :: len(writers)],
        )
        error = error or begun[leader]
        written = self._gather([error, files])
        if rank == leader:
            parts = [written[each] for each in writers]
            error = next((failed for failed, _ in parts if failed), "")
            records = [record for _, some in parts for record in some]
            if not error and len(records) != len(planned.pieces):
                error = "the ranks do not agree on who shares a folder"
            if not error:
                error = self._attempt(
                    lambda: self._folder.commit(incoming, step, planned, records, ranks)
                )
            shutil.rmtree(incoming, ignore_errors=True)
        ended = self._gather([leader, error])
        failed = {leader for leader, reason in ended if reason}
        if leader in failed:
            log.warning("checkpoint failed step=%d reason=%r", step, ended[leader][1])
        return SavedCheckpoint(
            step,
            len({leader for leader, _ in ended} - failed),
            [f"rank {at}: {reason}" for at, (_, reason) in enumerate(ended) if reason],
        )

    def _write(
        self, incoming: Path, planned: PlannedState, pieces: Sequence[Piece]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Write this rank's pieces; return the error, and the records of the others.

        The ranks write piece by piece: the time limit of the group is that of one
        operation.
        """
        left = deque(pieces)
        error, files = "", list[dict[str, Any]]()

        def write_next() -> None:
            files.extend(write_pieces(incoming, planned, [left.popleft()]))

        while any(self._gather(len(left))):
            if left and (error := self._attempt(write_next)):
                left.clear()
        return error, files

    def _begin(self) -> None:
        self._began_in = (self._group.generation, self._group.place.size)

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks.

        Raises _GroupChanged, on all ranks, if these are not those that have begun.
        """
        found = gather_values(self._group, [*self._began_in, value])
        began = {(generation, size) for generation, size, _ in found}
        if len(began) != 1 or len(found) != found[0][1]:
            raise _GroupChanged
        return [each for _, _, each in found]

    def _find_writers(self, own: Any) -> tuple[list[int], str, list[Any]]:
        """Return the ranks that see this rank's folder, in order; and all ranks' own.

        Each rank leaves a mark, and looks whose marks are there.
        """
        rank = self._group.place.rank
        folder = self._folder.path
        # Drawn again: what a killed run has left means nothing.
        drawn = self._gather(os.urandom(8).hex())[0]
        marks = [
            folder / f"{MARK}{drawn}-{each}" for each in range(self._group.place.size)
        ]

        def leave_mark() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            marks[rank].touch()

        error = self._attempt(leave_mark)
        left = self._gather([not error, own])
        seen = [
            each
            for each, (has_left, _) in enumerate(left)
            if not error and has_left and marks[each].exists()
        ]
        self._gather(None)  # until all have looked
        self._attempt(lambda: marks[rank].unlink(missing_ok=True))
        return seen or [rank], error, [each for _, each in left]

    def _attempt(self, act: Callable[[], object]) -> str:
        """Act; return the reason if the disk does not let this rank."""
        try:
            act()
        except OSError as error:
            return f"cannot write to {self._folder.path}: {error.strerror or error}"
        return ""
