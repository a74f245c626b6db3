"""Reports events of a worker to the user."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from shoal.cli.join_target import JoinTarget
from shoal.cli.terminal import printable
from shoal.worker.agent import WorkerEvent

LISTED_MAX = 10  # models that a message names
JOINED = "joined"


def worker_reporter(
    there: JoinTarget, *, as_json: bool
) -> Callable[[str, Mapping[str, object], WorkerEvent], None]:
    """Return a function that prints an event of a worker.

    The line for people names the first entry of ``about``: a model, an engine or a key.
    """

    def tell(name: str, about: Mapping[str, object], happening: WorkerEvent) -> None:
        if as_json:
            fields: dict[str, object] = {
                "event": happening.event,
                "url": there.display_url,
                "name": name,
            }
            if happening.reason:
                fields["reason"] = happening.reason
            print(json.dumps({**fields, **about}), flush=True)
            return
        kind, what = next(iter(about.items()))
        # The first line listed them; later ones are read for the reason.
        if isinstance(what, list) and happening.event != JOINED and len(what) > 1:
            what = f"{len(what)} {kind}"
        elif isinstance(what, list):
            what = f"{kind} {_some(what) or 'that clients send'}"
        elif kind != "model":
            what = f"{kind.replace('_', ' ')} {what}"
        reason = f": {happening.reason}" if happening.reason else ""
        line = f"{happening.event} {name} with {what}{reason}"
        print(printable(line), file=sys.stderr, flush=True)

    return tell


def report_omitted_models(offered: Sequence[str], others: Sequence[str]) -> None:
    """Print which models the wire cannot carry, and how to offer them."""
    named = _some(others)
    line = (
        f"only {', '.join(offered)} is offered, since the wire carries no more; to "
        f"offer another ({named}), join with --model under another --name"
    )
    print(printable(line), file=sys.stderr, flush=True)


def _some(names: Sequence[str]) -> str:
    named = ", ".join(names[:LISTED_MAX])
    if len(names) > LISTED_MAX:
        named += f" and {len(names) - LISTED_MAX} more"
    return named
