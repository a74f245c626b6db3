"""What a vendor's servers did in earlier turns of a conversation, as text.

They search the web, run code and so on within an answer, and clients send what they
did with the history.  No chat has a form for it, and a model can still read it.
"""

import json
from collections.abc import Mapping, Sequence

from shoal.domain.work import JSON

WORD_MAX = 1024
"""Characters without a space, beyond which a text is an image or encrypted."""


def server_step(name: str, *values: JSON) -> str:
    """Return the text of a step: its name, and what can be read of its values."""
    shown = [_readable(value) for value in values]
    texts = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in shown
        if not _is_empty(value)
    ]
    return f"[{' '.join([name, *texts])}]"


def unreadable(what: str) -> str:
    """Return the text of something in a history that no model here can read."""
    return f"[{what}: it cannot be read here]"


def _readable(value: JSON) -> JSON:
    match value:
        case str():
            return value if len(value) <= WORD_MAX or len(value.split()) > 1 else None
        case Mapping():
            fields = {
                name: _readable(each)
                for name, each in value.items()
                if not name.startswith("encrypted")
            }
            return {name: each for name, each in fields.items() if not _is_empty(each)}
        case Sequence():
            items = [_readable(each) for each in value]
            return [each for each in items if not _is_empty(each)]
        case _:
            return value


def _is_empty(value: JSON) -> bool:
    return value is None or value == "" or value == [] or value == {}
