"""The messages between the ranks of a run and its rendezvous: JSON objects.

The first key of a message names it:

=============================  =====================================================
from a rank                    meaning
=============================  =====================================================
``announce``: generation       it is there, in this generation (-1: in none yet);
                               the first message over each connection
``ended``: generation          it has ended the generation, with ``reason``, ``cause``
                               and ``suspect`` (a gang rank, or null)
``late``: generation           its operation takes longer than usual
``pong``: number               the answer to a ``ping``
``leave``: operation           it is done, and this operation was its last
=============================  =====================================================

``announce`` and ``ended`` have the rank's whole state, so that a coordinator that was
restarted knows the run again: ``gang_rank`` (its rank in the gang, for ever),
``hosts``, ``port`` and ``port_id`` (where it listens), ``operation`` (the last one that
it has completed; -1: none), ``step``, ``admits`` (whether its loop takes new ranks in)
and ``saves`` (whether its script saves the model as the lowest rank that is left, and
not only as rank 0).  The first message over a connection also has the rank's formation.

=============================  =====================================================
to a rank                      meaning
=============================  =====================================================
``formation``: generation      the next generation; see ``Formation``
``end``: generation            end the generation, and report it, with ``reason`` and
                               ``cause``; for an admission, after the operation
``ping``: number               answer it at once
``waiting``: count             number of new ranks that wait to be admitted
``out``: reason                it takes no part any more; final
=============================  =====================================================

What a new generation does first, so that no rank misses a result, follows from its
formation (``settle``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import PeerError, Unavailable
from shoal.domain.work import JSON

RunMessage: TypeAlias = Mapping[str, JSON]

TEXT_MAX = 1000  # characters of a reason or an address; longer ones are cut
HOSTS_MAX = 16  # addresses of a machine
INTEGER_MAX = (1 << 53) - 1  # as in JSON numbers of all programs
NO_GENERATION = -1
NO_OPERATION = -1


class EndCause(Enum):
    """Why a rank has ended its generation."""

    FAILURE = "failure"  # a rank is lost, late, or sends damaged data
    ADMISSION = "admission"  # new ranks are to be admitted
    STOP = "stop"  # the run must not go on: the ranks differ


@dataclass(frozen=True, slots=True)
class FormedRank:
    """A rank of a generation: which it is in its gang, where, and how far it is."""

    gang_rank: int
    hosts: Sequence[str]
    port: int
    port_id: str
    operation: int = NO_OPERATION
    step: int = 0

    def message(self) -> dict[str, JSON]:
        """Return the fields of a message."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**own, "hosts": list(self.hosts)}


@dataclass(frozen=True, slots=True)
class RankState(FormedRank):
    """A rank's statements about itself."""

    admits: bool = False
    saves: bool = True

    def formed(self) -> FormedRank:
        """Return the form in which other ranks of a generation receive it."""
        return FormedRank(*(getattr(self, each.name) for each in fields(FormedRank)))

    @classmethod
    def of(cls, message: RunMessage) -> "RankState":
        """Return the state in a message.  Raises PeerError."""
        return cls(
            *_rank_in(message),
            admits=message.get("admits") is True,
            saves=message.get("saves") is not False,
        )


@dataclass(frozen=True, slots=True)
class EndReport:
    """Why a rank says that its generation has ended."""

    reason: str
    cause: EndCause = EndCause.FAILURE
    suspect: int | None = None  # a gang rank

    def message(self) -> dict[str, JSON]:
        """Return the fields of a message."""
        return {
            "reason": self.reason[:TEXT_MAX],
            "cause": self.cause.value,
            "suspect": self.suspect,
        }

    @classmethod
    def of(cls, message: RunMessage) -> "EndReport":
        """Return the report in a message.  Raises PeerError."""
        suspect = message.get("suspect")
        return cls(
            text(message, "reason"),
            cause_of(message),
            None if suspect is None else number(message, "suspect", 0),
        )


@dataclass(frozen=True, slots=True)
class Formation:
    """A generation: who is in it, by rank, and the secret that they share.

    ``newest`` is the last operation that any rank has completed.  ``story`` says what
    has happened since the last generation.  ``admitted``: new ranks are in it, or would
    be.
    """

    generation: int
    rank: int
    secret: str
    ranks: Sequence[FormedRank]
    newest: int = NO_OPERATION
    story: Sequence[str] = field(default=())
    admitted: bool = False

    def message(self) -> dict[str, JSON]:
        """Return the message for one rank."""
        return {
            "formation": self.generation,
            "rank": self.rank,
            "secret": self.secret,
            "ranks": [each.message() for each in self.ranks],
            "newest": self.newest,
            "story": list(self.story),
            "admitted": self.admitted,
        }

    @classmethod
    def of(cls, message: RunMessage) -> "Formation":
        """Return the formation in a message.  Raises PeerError."""
        ranks, story = message.get("ranks"), message.get("story")
        if not isinstance(ranks, list) or not isinstance(story, list):
            raise PeerError("formation: expected lists of ranks and of the story")
        formed = []
        for each in ranks:
            if not isinstance(each, dict):
                raise PeerError("formation: expected objects for its ranks")
            formed.append(FormedRank(*_rank_in(each)))
        rank = number(message, "rank", 0)
        if rank >= len(formed):
            raise PeerError(f"formation: rank {rank} of {len(formed)}")
        return cls(
            number(message, "formation", 0),
            rank,
            text(message, "secret"),
            tuple(formed),
            number(message, "newest", NO_OPERATION),
            tuple(str(each) for each in story),
            message.get("admitted") is True,
        )


def _rank_in(message: RunMessage) -> tuple[int, Sequence[str], int, str, int, int]:
    """Return the fields of a ``FormedRank`` in a message.  Raises PeerError."""
    return (
        number(message, "gang_rank", 0),
        texts(message, "hosts"),
        number(message, "port", 1),
        text(message, "port_id"),
        number(message, "operation", NO_OPERATION),
        number(message, "step", 0),
    )


def cause_of(message: RunMessage) -> EndCause:
    """Return the cause in a message.  Raises PeerError."""
    try:
        return EndCause(text(message, "cause"))
    except ValueError as error:
        raise PeerError("cause: unknown") from error


def number(message: RunMessage, name: str, least: int) -> int:
    """Return a number of a message.  Raises PeerError."""
    value = message.get(name)
    if type(value) is not int or not least <= value <= INTEGER_MAX:
        raise PeerError(f"{name}: expected a number from {least}")
    return value


def text(message: RunMessage, name: str) -> str:
    """Return a text of a message.  Raises PeerError."""
    value = message.get(name)
    if not isinstance(value, str):
        raise PeerError(f"{name}: expected a text")
    return value[:TEXT_MAX]


def texts(message: RunMessage, name: str) -> Sequence[str]:
    """Return a list of texts of a message.  Raises PeerError."""
    value = message.get(name)
    if not isinstance(value, list) or len(value) > HOSTS_MAX:
        raise PeerError(f"{name}: expected a list of at most {HOSTS_MAX} texts")
    if not all(isinstance(each, str) for each in value):
        raise PeerError(f"{name}: expected texts")
    return tuple(str(each)[:TEXT_MAX] for each in value)


class RankMissing(Unavailable, RuntimeError):
    """The operation needs a rank that is lost."""


class Settlement(NamedTuple):
    """Whether this rank misses a result, and the rank that sends it to all, if any."""

    misses: bool = False
    root: int | None = None


def settle(
    formation: Formation, mine: int, *, shared: bool, arrived: bool
) -> Settlement:
    """Return what follows from the operations that ranks have completed.

    ``mine`` is the last one of this rank.  ``shared`` says whether the newest one gives
    all ranks the same: this rank has completed it, or it is under way here.
    ``arrived``: it is under way, and has its result; all others have theirs too, as
    one of them has passed the barrier.

    Raises RankMissing if no rank that is left has the result.
    """
    newest = formation.newest
    operations = [each.operation for each in formation.ranks]
    if formation.admitted or min(operations) == newest:
        return Settlement()
    misses = mine < newest
    if shared:
        if newest not in operations:
            raise RankMissing(f"the ranks with the result of operation {newest} left")
        return Settlement(misses, operations.index(newest))
    if misses and not arrived:
        raise RankMissing(f"nothing of operation {newest} has arrived here")
    return Settlement(misses)
