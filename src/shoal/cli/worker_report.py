"""Reports to the user what happens to a worker."""

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
    """Return what tells of a worker, what it is about, and what happened.

    ``about`` begins with what the line for people names: a model, an engine or a key.
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
        # Whoever reads on has seen them when it joined, and looks for the reason.
        if isinstance(what, list) and happening.event != JOINED and len(what) > 1:
            what = f"{len(what)} {kind}"
        elif isinstance(what, list):
            what = f"{kind} {_some(what) or 'that are sent along'}"
        elif kind != "model":
            what = f"{kind.replace('_', ' ')} {what}"
        reason = f": {happening.reason}" if happening.reason else ""
        line = f"{happening.event} {name} with {what}{reason}"
        print(printable(line), file=sys.stderr, flush=True)

    return tell


def report_omitted_models(offered: Sequence[str], others: Sequence[str]) -> None:
    """Say which models a wire has no room for, and how they can be had."""
    named = _some(others)
    line = (
        f"only {', '.join(offered)} is offered, as the wire takes no more; for another "
        f"({named}) join under another --name, with --model"
    )
    print(printable(line), file=sys.stderr, flush=True)


def _some(names: Sequence[str]) -> str:
    named = ", ".join(names[:LISTED_MAX])
    if len(names) > LISTED_MAX:
        named += f" and {len(names) - LISTED_MAX} more"
    return named
