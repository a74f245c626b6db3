"""Validates an incoming model: each chunk, and its completion.

Pure: writes nothing and creates no path.  Peers may be hostile.  Other programs send
each file from beginning to end, the files in any order, and drop empty ones.
"""

from dataclasses import dataclass, field

from shoal.domain.errors import InvalidRequest, LimitExceeded, PeerError
from shoal.domain.model_messages import ModelChunk, ModelDone
from shoal.models.names import check_file_name

UNANNOUNCED_MAX = 100 * 10**9  # bytes of a model whose size was not announced
FILES_MAX = 1000  # of one model


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Append ``data`` to a file, which is new if ``offset`` is 0."""

    file_name: str
    offset: int
    data: bytes


@dataclass(slots=True)
class IncomingModel:
    """One model, requested from one peer.

    ``size`` is the announced one in bytes; None if there was none: then at most
    ``unannounced_max`` are accepted.
    """

    transfer_id: str
    model: str
    size: int | None
    unannounced_max: int = UNANNOUNCED_MAX
    received: int = 0  # bytes
    _offsets: dict[str, int] = field(default_factory=dict)  # the end of each file
    _spellings: dict[str, str] = field(default_factory=dict)  # by name in lower case

    @property
    def files(self) -> int:
        """The number of files begun."""
        return len(self._offsets)

    def belongs(self, message: ModelChunk | ModelDone) -> bool:
        """Return whether a message belongs to this transfer."""
        # Some peers change the case of the id.
        return message.transfer_id.lower() == self.transfer_id.lower()

    def add_chunk(self, chunk: ModelChunk) -> FileWrite:
        """Validate a chunk; return where to write it.

        Raises PeerError for an unsafe name, a gap, a repetition or too much data of a
        model without a size, and LimitExceeded past the announced size.
        """
        name = self._name(chunk.file_name)
        expected = self._offsets.get(name, 0)
        if chunk.offset != expected:
            raise PeerError(f"{name}: chunk at {chunk.offset}, expected {expected}")
        if not chunk.data and name in self._offsets:
            raise PeerError(f"{name}: an empty chunk at {expected}")
        received = self.received + len(chunk.data)
        if self.size is not None and received > self.size:
            raise LimitExceeded(f"model {self.model}", received, self.size)
        if self.size is None and received > self.unannounced_max:
            raise PeerError(
                f"the peer did not announce the size of {self.model}, and sends more "
                f"than {self.unannounced_max / 1e9:g} GB: if the model is larger, "
                "raise --unannounced-max"
            )
        self.received = received
        self._offsets[name] = expected + len(chunk.data)
        self._spellings[name.lower()] = name
        return FileWrite(name, expected, chunk.data)

    def complete(self, done: ModelDone) -> None:
        """Validate that the model is complete.

        The announced size is exact, except for models with folders, whose transfer
        ends before it is complete.

        Raises PeerError if data is missing, or the message names another model.
        """
        if done.model != self.model:
            raise PeerError(f"completion of {done.model!a}; expected {self.model}")
        if not self._offsets:
            raise PeerError(f"completion of {self.model} without any file")
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
            # Case-insensitive file systems would merge them.
            if (other := self._spellings.get(name.lower())) is not None:
                raise PeerError(f"{name} differs from {other} only in case")
            if len(self._offsets) >= FILES_MAX:
                raise PeerError(f"{self.model} has more than {FILES_MAX} files")
        return name
