"""A folder of checkpoints on this machine: each is whole and right, or not there.

A checkpoint is a folder ``step-N`` of files in the format of safetensors, none larger
than a frame, and ``manifest.json``, which has everything else and the size and SHA-256
of each file.  It is written under a hidden name, synced, and renamed.  The tensors of
a state are cut into *pieces*, which say which numbers are in which file.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from shoal.config.private_files import sync_folder
from shoal.domain.errors import ShoalError
from shoal.training.checkpoints.state_tree import flatten, memory_of, restore

PIECE_MAX = 256 << 20  # bytes of a file: that of a frame, so that one can be sent
HEADER_MAX = 1 << 20  # of these, for names and shapes
PARTS_MAX = 4096  # of one piece, so that the header fits

FORMAT = 1
MANIFEST = "manifest.json"
INCOMING = ".incoming-"  # what a hidden, incomplete checkpoint's name begins with
MARK = ".rank-"  # and that of the marks by which ranks find who shares a folder
_NAME = re.compile(r"step-(\d+)")

State = Mapping[str, Any]
"""Sections of a state, such as ``model`` and ``optimizer``, each of any ``state_dict``.
"""

T = TypeVar("T")

log = logging.getLogger("shoal.training")


class DamagedCheckpoint(ShoalError):
    """A checkpoint's files are not those that were written; the message names one."""


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """A state, and ``ranks``: what each rank had of its own, by rank.

    ``digest`` is the SHA-256 of everything in it.
    """

    step: int
    state: dict[str, Any]
    ranks: Sequence[Any]
    digest: str


class SizedTensor(NamedTuple):
    """A tensor of ``length`` numbers of ``unit`` bytes each."""

    section: str
    name: str
    length: int
    unit: int


class TensorPart(NamedTuple):
    """Numbers ``begin`` to ``end`` of a tensor, in C order."""

    section: str
    name: str
    begin: int
    end: int


class Piece(NamedTuple):
    """A file and what it holds; all parts are of one section."""

    file: str
    parts: Sequence[TensorPart]


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A state that is about to be written: its tensors, and the pieces they make."""

    skeletons: Mapping[str, Any]
    tensors: Mapping[tuple[str, str], Tensor]
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, state: State, piece_max: int = PIECE_MAX) -> "PlannedState":
        """Plan a state.  Raises InvalidRequest for values that are not written."""
        skeletons: dict[str, Any] = {}
        tensors: dict[tuple[str, str], Tensor] = {}
        for section, value in state.items():
            skeletons[section], found = flatten(value)
            tensors |= {(section, name): each for name, each in found.items()}
        pieces = plan_pieces(
            (
                SizedTensor(section, name, each.numel(), each.element_size())
                for (section, name), each in tensors.items()
            ),
            piece_max,
        )
        return cls(skeletons, tensors, pieces)


class CheckpointFolder:
    """The checkpoints below a path, of which the last ``keep`` are kept.

    Methods raise OSError if the disk is full or fails.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep}: at least the last checkpoint is kept")
        self.path = path
        self._keep = keep

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(each.name) for each in self.path.iterdir())
        found = [int(name[1]) for name in names if name is not None]
        return sorted(each for each in found if (self._at(each) / MANIFEST).exists())

    def begin(self, name: str) -> Path:
        """Make the hidden folder of a new checkpoint; remove those of killed runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        for each in self.path.iterdir():
            if each.name.startswith(INCOMING):
                shutil.rmtree(each, ignore_errors=True)
            elif each.name.startswith(MARK):
                each.unlink(missing_ok=True)
        incoming = self.path / f"{INCOMING}{name}"
        incoming.mkdir()
        return incoming

    def commit(
        self,
        incoming: Path,
        step: int,
        planned: PlannedState,
        files: Iterable[Mapping[str, Any]],
        ranks: Sequence[Any],
    ) -> str:
        """Write the manifest, rename the folder, and remove old checkpoints.

        ``files`` are the records of all pieces.  Returns the checkpoint's digest.
        """
        content = {
            "format": FORMAT,
            "step": step,
            "state": planned.skeletons,
            "tensors": [
                [section, name, _dtype_name(each), list(each.shape)]
                for (section, name), each in planned.tensors.items()
            ],
            "files": sorted(files, key=lambda each: str(each["file"])),
            "ranks": list(ranks),
        }
        digest = _digest(content)
        text = json.dumps({"digest": digest, "content": content})
        _write(incoming / MANIFEST, text.encode())
        sync_folder(incoming)
        target, replaced = self._at(step), self.path / f"{INCOMING}replaced"
        if target.exists():
            target.rename(replaced)  # a damaged one, or of a run before this one
        try:
            incoming.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise
        sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune(step)
        return digest

    def save(
        self,
        step: int,
        state: State,
        ranks: Sequence[Any] = (),
        piece_max: int = PIECE_MAX,
    ) -> str:
        """Write a whole checkpoint; return its digest.  After an error, none is there.

        Raises InvalidRequest for values that are not written, and OSError.
        """
        planned = PlannedState.of(state, piece_max)
        incoming = self.begin(str(step))
        try:
            files = [*write_pieces(incoming, planned, planned.pieces)]
            return self.commit(incoming, step, planned, files, ranks)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def load(self, step: int) -> TrainingCheckpoint:
        """Return a checkpoint, all of which was verified.

        Raises DamagedCheckpoint, and OSError.
        """
        return _result_of(self._loading(step))

    def load_latest(self) -> TrainingCheckpoint | None:
        """Return the last checkpoint that is whole; log those that are damaged."""
        return _result_of(self.loading_latest())

    def loading_latest(self) -> Generator[None, None, TrainingCheckpoint | None]:
        """Do what ``load_latest`` does, file by file."""
        for step in reversed(self.steps):
            try:
                return (yield from self._loading(step))
            except (DamagedCheckpoint, OSError) as error:
                log.warning("checkpoint skipped step=%d reason=%r", step, str(error))
        return None

    def _loading(self, step: int) -> Generator[None, None, TrainingCheckpoint]:
        folder = self._at(step)
        content, digest = _read_manifest(folder / MANIFEST)
        tensors: dict[tuple[str, str], Tensor] = {}
        for section, name, dtype, shape in content["tensors"]:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise DamagedCheckpoint(f"{folder}: {name} has no dtype {dtype!r}")
            tensors[section, name] = torch.empty(shape, dtype=kind)
        for record in content["files"]:
            _read_piece(folder / record["file"], record, tensors)
            yield
        state = {
            section: restore(
                skeleton,
                {name: each for (of, name), each in tensors.items() if of == section},
            )
            for section, skeleton in content["state"].items()
        }
        return TrainingCheckpoint(content["step"], state, content["ranks"], digest)

    def _prune(self, saved: int) -> None:
        """Remove old checkpoints, and what is later than the one just saved.

        Later ones are damaged: otherwise the run had continued from them.
        """
        earlier = [each for each in self.steps if each <= saved]
        for each in {*self.steps} - {*earlier[-self._keep :]}:
            shutil.rmtree(self._at(each), ignore_errors=True)

    def _at(self, step: int) -> Path:
        return self.path / f"step-{step:08}"


def plan_pieces(
    tensors: Iterable[SizedTensor], piece_max: int = PIECE_MAX
) -> list[Piece]:
    """Return the pieces of a state, each of at most ``piece_max`` bytes as a file.

    A tensor is cut only if it is larger than a piece.  The same tensors make the same
    pieces, so that ranks need not agree on more.
    """
    room = piece_max - min(HEADER_MAX, piece_max // 2)
    pieces: list[Piece] = []
    parts: list[TensorPart] = []
    numbers: dict[str, int] = {}
    free = 0

    def close() -> None:
        if parts:
            section = parts[0].section
            numbers[section] = number = numbers.get(section, 0) + 1
            pieces.append(Piece(f"{section}-{number:05}.safetensors", tuple(parts)))
            parts.clear()

    for section, name, length, unit in tensors:
        most = room // unit
        for begin in range(0, max(length, 1), most):
            end = min(length, begin + most)
            size = (end - begin) * unit
            other = bool(parts) and parts[0].section != section
            if other or size > free or len(parts) == PARTS_MAX:
                close()
                free = room
            parts.append(TensorPart(section, name, begin, end))
            free -= size
    close()
    return pieces


def write_pieces(
    folder: Path, planned: PlannedState, pieces: Iterable[Piece]
) -> Iterator[dict[str, Any]]:
    """Write some pieces of a state, synced; yield the record of each, for the manifest.

    Raises OSError.
    """
    for piece in pieces:
        tensors = {
            _part_name(part, whole := planned.tensors[part.section, part.name]): (
                _part_of(part, whole)
            )
            for part in piece.parts
        }
        data = to_safetensors(tensors)
        _write(folder / piece.file, data)
        yield {
            "file": piece.file,
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "parts": [list(part) for part in piece.parts],
        }


def _result_of(steps: Generator[None, None, T]) -> T:
    """Carry out all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


def _part_name(part: TensorPart, tensor: Tensor) -> str:
    """Return a part's name in its file: the tensor's own, if it is all of it."""
    if part.end - part.begin == tensor.numel():
        return part.name
    return f"{part.name}[{part.begin}:{part.end}]"


def _part_of(part: TensorPart, tensor: Tensor) -> Tensor:
    # Copies: tied parameters share memory, which the format does not allow.
    if part.end - part.begin == tensor.numel():
        return tensor.detach().cpu().contiguous().clone()
    row = tensor.detach().contiguous().reshape(-1)
    return row[part.begin : part.end].cpu().clone()


def _read_piece(
    path: Path, record: Mapping[str, Any], tensors: Mapping[tuple[str, str], Tensor]
) -> None:
    """Read a piece into its tensors.  Raises DamagedCheckpoint."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    if len(data) != record["size"]:
        raise DamagedCheckpoint(
            f"{path} has {len(data)} bytes, and {record['size']} were written"
        )
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise DamagedCheckpoint(f"{path} is damaged: its SHA-256 differs")
    try:
        found = read_safetensors(data)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    for part in (TensorPart(*each) for each in record["parts"]):
        whole = tensors[part.section, part.name]
        own = memory_of(found[_part_name(part, whole)])
        unit = whole.element_size()
        memory_of(whole)[part.begin * unit : part.end * unit] = own


def _read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """Return a manifest's content and its digest.  Raises DamagedCheckpoint."""
    try:
        document = json.loads(path.read_bytes())
        content, digest = document["content"], document["digest"]
        found = _digest(content)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is no manifest: {error}") from error
    if found != digest:
        raise DamagedCheckpoint(f"{path} is damaged: its digest differs")
    if content["format"] != FORMAT:
        raise DamagedCheckpoint(
            f"{path} has format {content['format']}, and this Shoal reads {FORMAT}"
        )
    return content, digest


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _write(path: Path, data: bytes) -> None:
    """Write a new file, synced to disk; without it, none is there."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
