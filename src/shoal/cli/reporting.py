"""Tells the user what becomes of a worker."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from shoal.cli.terminal import shown
from shoal.cli.whereto import Target
from shoal.worker.agent import Happening

NAMED_MAX = 10  # models that a message names
JOINED = "joined"


def reporter(
    there: Target, *, as_json: bool
) -> Callable[[str, Mapping[str, object], Happening], None]:
    """Return what tells of a worker, what it is about, and what happened.

    ``about`` begins with what the line for people names: a model, an engine or a key.
    """

    def tell(name: str, about: Mapping[str, object], happening: Happening) -> None:
        if as_json:
            fields: dict[str, object] = {
                "event": happening.event,
                "url": there.shown,
                "name": name,
            }
            if happening.reason:
                fields["reason"] = happening.reason
            print(json.dumps({**fields, **about}), flush=True)
            return
        kind, what = next(iter(about.items()))
        # Whoever reads on has seen them when it joined, and looks for the reason.
        if isinstance(what, list) and happening.event != JOINED and len(what) > 1:
            what = f"{len(what)} {kind}"
        elif isinstance(what, list):
            what = f"{kind} {_some(what) or 'that are sent along'}"
        elif kind != "model":
            what = f"{kind.replace('_', ' ')} {what}"
        reason = f": {happening.reason}" if happening.reason else ""
        line = f"{happening.event} {name} with {what}{reason}"
        print(shown(line), file=sys.stderr, flush=True)

    return tell


def tell_of_others(offered: Sequence[str], others: Sequence[str]) -> None:
    """Say which models a wire has no room for, and how they can be had."""
    named = _some(others)
    line = (
        f"only {', '.join(offered)} is offered, as the wire takes no more; for another "
        f"({named}) join under another --name, with --model"
    )
    print(shown(line), file=sys.stderr, flush=True)


def _some(names: Sequence[str]) -> str:
    named = ", ".join(names[:NAMED_MAX])
    if len(names) > NAMED_MAX:
        named += f" and {len(names) - NAMED_MAX} more"
    return named
