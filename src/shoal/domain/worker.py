"""What a worker is willing to do."""

from dataclasses import dataclass

from shoal.domain.work import Feature, Kind


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker will run, as it declared when it joined.

    ``remark`` says what is odd about the declaration, for whoever asks why the worker
    gets no work.
    """

    kinds: frozenset[Kind]
    models: frozenset[str] = frozenset()
    slots: int = 1  # jobs at a time; 0: none
    features: frozenset[Feature] = frozenset()
    remark: str = ""
