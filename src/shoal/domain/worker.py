"""What a worker is willing to do."""

from dataclasses import dataclass

from shoal.domain.work import Feature, Kind

CHATS = frozenset({Kind.CHAT})


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a worker has, and what can be done with it there.

    ``context`` is how many tokens a question and its answer may have together; 0 where
    nobody knows.
    """

    name: str
    kinds: frozenset[Kind] = CHATS
    features: frozenset[Feature] = frozenset()
    context: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker will run, as it declared when it joined.

    ``context`` is as in ``Model``.  ``only_for`` names the keys whose jobs it takes;
    empty: everybody's.  ``remark`` says what is odd about the declaration, for whoever
    asks why the worker gets no work.
    """

    kinds: frozenset[Kind]
    models: frozenset[str] = frozenset()
    slots: int = 1  # jobs at a time; 0: none
    features: frozenset[Feature] = frozenset()
    context: int = 0
    only_for: frozenset[str] = frozenset()
    remark: str = ""
