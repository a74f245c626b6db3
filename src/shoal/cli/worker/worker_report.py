"""Reports events of a worker to the user."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from shoal.cli.terminal import printable
from shoal.cli.worker.join_target import JoinTarget
from shoal.worker.agent import WorkerEvent

LISTED_MAX = 10  # models that a message names
JOINED = "joined"


def worker_reporter(
    target: JoinTarget, *, as_json: bool
) -> Callable[[str, Mapping[str, object], WorkerEvent], None]:
    """Return a function that prints an event of a worker.

    The line for people names the first entry of ``about``: a model, an engine or a key.
    """

    def report(name: str, about: Mapping[str, object], event: WorkerEvent) -> None:
        if as_json:
            fields: dict[str, object] = {
                "event": event.kind,
                "url": target.display_url,
                "name": name,
            }
            if event.reason:
                fields["reason"] = event.reason
            print(json.dumps({**fields, **about}), flush=True)
            return
        kind, subject = next(iter(about.items()))
        # The first line listed them; later ones are read for the reason.
        if isinstance(subject, list) and event.kind != JOINED and len(subject) > 1:
            subject = f"{len(subject)} {kind}"
        elif isinstance(subject, list):
            subject = f"{kind} {_some(subject) or 'that clients send'}"
        elif kind != "model":
            subject = f"{kind.replace('_', ' ')} {subject}"
        reason = f": {event.reason}" if event.reason else ""
        line = f"{event.kind} {name} with {subject}{reason}"
        print(printable(line), file=sys.stderr, flush=True)

    return report


def report_omitted_models(offered: Sequence[str], others: Sequence[str]) -> None:
    """Print which models the wire cannot carry, and how to offer them."""
    listed = _some(others)
    line = (
        f"only {', '.join(offered)} is offered, since the wire carries no more; to "
        f"offer another ({listed}), join with --model under another --name"
    )
    print(printable(line), file=sys.stderr, flush=True)


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:LISTED_MAX])
    if len(names) > LISTED_MAX:
        listed += f" and {len(names) - LISTED_MAX} more"
    return listed
