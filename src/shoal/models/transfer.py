"""An incoming model: checks what the peer sends, and says where it is written.

Pure: nothing is written here, and no path is made.  The rules are for peers that may be
hostile; peers of other makers send each file from its beginning to its end, the files
in any order, and lose empty ones.
"""

from dataclasses import dataclass, field

from shoal.domain.errors import InvalidRequest, LimitExceeded, PeerError
from shoal.domain.model_messages import ModelChunk, ModelDone
from shoal.models.names import check_file_name

SIZE_MAX = 4 << 40  # bytes of a model whose size was not announced
FILES_MAX = 1000  # of one model


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Append ``data`` to a file, which is new if ``offset`` is 0."""

    file_name: str
    offset: int
    data: bytes


@dataclass(slots=True)
class IncomingModel:
    """One model that we asked one peer for.

    ``size`` is what was announced, in bytes; None: nothing was.
    """

    transfer_id: str
    model: str
    size: int | None
    received: int = 0  # bytes
    _offsets: dict[str, int] = field(default_factory=dict)  # the end of each file
    _spellings: dict[str, str] = field(default_factory=dict)  # by name in lower case

    @property
    def files(self) -> int:
        """Return how many files have begun."""
        return len(self._offsets)

    def belongs(self, word: ModelChunk | ModelDone) -> bool:
        """Say whether a word belongs to this transfer."""
        # Peers write our ids in the case they like.
        return word.transfer_id.lower() == self.transfer_id.lower()

    def add_chunk(self, chunk: ModelChunk) -> FileWrite:
        """Check one chunk and say where it goes.

        Raises PeerError for an unsafe name, a gap or a repetition, and LimitExceeded
        past the announced size.
        """
        name = self._name(chunk.file_name)
        expected = self._offsets.get(name, 0)
        if chunk.offset != expected:
            raise PeerError(f"{name}: chunk at {chunk.offset}, expected {expected}")
        if not chunk.data and name in self._offsets:
            raise PeerError(f"{name}: an empty chunk at {expected}")
        limit = SIZE_MAX if self.size is None else self.size
        received = self.received + len(chunk.data)
        if received > limit:
            raise LimitExceeded(f"model {self.model}", received, limit)
        self.received = received
        self._offsets[name] = expected + len(chunk.data)
        self._spellings[name.lower()] = name
        return FileWrite(name, expected, chunk.data)

    def complete(self, done: ModelDone) -> None:
        """Check that nothing is missing.

        The size that peers announce is exact for what can be sent: only folders within
        a model make it inexact, and those end a transfer before it is complete.

        Raises PeerError if something is, or if another model is said to be complete.
        """
        if done.model != self.model:
            raise PeerError(
                f"{done.model!a} is complete, they say; expected {self.model}"
            )
        if not self._offsets:
            raise PeerError(f"{self.model} is complete, they say, without any file")
        if self.size is not None and self.received != self.size:
            raise PeerError(
                f"{self.model} ended after {self.received} of {self.size} bytes"
            )

    def _name(self, file_name: str) -> str:
        try:
            name = check_file_name(file_name)
        except InvalidRequest as error:
            raise PeerError(str(error)) from error
        if name not in self._offsets:
            # On some systems both would be one file.
            if (other := self._spellings.get(name.lower())) is not None:
                raise PeerError(f"{name} differs from {other} in case alone")
            if len(self._offsets) >= FILES_MAX:
                raise PeerError(f"{self.model} has more than {FILES_MAX} files")
        return name
