"""Announcement of Shoal's extension, in a header that original peers ignore.

The value is a comma-separated list: ``shoal`` first, then names of job kinds and
features, and settings as ``name=value``.  Unknown entries are ignored.
"""

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, unquote

from shoal.domain.job import PRIVACY_CLASSES, Privacy
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, ServedModel
from shoal.protocols.grandsage.codec import well_formed

HEADER = "Shoal-Extensions"
SHOAL = "shoal"
CONTEXT = "context"
ONLY_FOR = "only-for"
PRIVACY = "privacy"
PRICE = "price"
ENGINE = "engine"

CONTEXT_MAX = 2**31 - 1  # tokens
PRICE_MAX = 256  # characters
ENGINE_MAX = 64  # characters
ONLY_FOR_MAX = 256  # most keys that a node may list


@dataclass(frozen=True, slots=True)
class Extensions:
    """A peer's announcement; ``known`` if the peer supports the extension."""

    known: bool = False
    kinds: frozenset[JobKind] = CHAT_ONLY
    features: frozenset[Feature] = frozenset()
    context: int = 0
    only_for: frozenset[str] = frozenset()
    privacy: Privacy | None = None
    price: str = ""
    engine: str = ""  # as in ``Offer``


def read_extensions(value: str) -> Extensions:
    """Parse the value of the header; an empty value announces nothing."""
    entries = [entry.strip() for entry in value.split(",")]
    names = {entry.lower() for entry in entries}
    if SHOAL not in names:
        return Extensions()
    settings = [entry.partition("=")[::2] for entry in entries]
    contexts = [number for name, number in settings if name.lower() == CONTEXT]
    only_for = [unquote(key) for name, key in settings if name.lower() == ONLY_FOR]
    prices = [unquote(text) for name, text in settings if name.lower() == PRICE]
    engines = [unquote(name) for key, name in settings if key.lower() == ENGINE]
    classes = [text.lower() for name, text in settings if name.lower() == PRIVACY]
    return Extensions(
        True,
        frozenset(kind for kind in INFERENCE_KINDS if kind.value in names) or CHAT_ONLY,
        frozenset(feature for feature in Feature if feature.value in names),
        _context(contexts[-1] if contexts else ""),
        frozenset(well_formed(key) for key in only_for[:ONLY_FOR_MAX] if key),
        PRIVACY_CLASSES.get(classes[-1] if classes else ""),
        well_formed(prices[-1][:PRICE_MAX]) if prices else "",
        well_formed(engines[-1][:ENGINE_MAX]) if engines else "",
    )


def write_extensions(
    model: ServedModel | None = None,
    only_for: Collection[str] = frozenset(),
    privacy: Privacy | None = None,
    price: str = "",
    engine: str = "",
) -> str:
    """Return the header value; with ``model``, also its job kinds and features."""
    entries = [SHOAL]
    if model is not None:
        entries += sorted(kind.value for kind in model.kinds)
        entries += sorted(feature.value for feature in model.features)
        if model.context:
            entries.append(f"{CONTEXT}={model.context}")
    entries += [
        f"{ONLY_FOR}={quote(key, safe='', errors='replace')}"
        for key in sorted(only_for)
    ]
    if privacy is not None:
        entries.append(f"{PRIVACY}={privacy.value}")
    if price:
        entries.append(f"{PRICE}={quote(price, safe='$', errors='replace')}")
    if engine:
        entries.append(f"{ENGINE}={quote(engine, safe='', errors='replace')}")
    return ", ".join(entries)


def _context(number: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) <= 10):
        return 0
    return min(int(number), CONTEXT_MAX)
