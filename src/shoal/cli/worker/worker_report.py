"""Reports a worker's events and the loading of its models to its owner."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from shoal.cli.terminal import console, printable
from shoal.cli.worker.join_target import JoinTarget
from shoal.engines.gguf_files import model_size
from shoal.engines.selection import EngineSource
from shoal.worker.agent import WorkerEvent

LISTED_MAX = 10  # models that a message names
JOINED = "joined"
OF_CONNECTION = frozenset({"waiting", "refused", "lost", "leaving"})  # kinds of events


def worker_reporter(
    target: JoinTarget, *, as_json: bool
) -> Callable[[str, Mapping[str, object], WorkerEvent], None]:
    """Return a function that prints an event of a worker.

    The line for people names the first entry of ``about``: a model, an engine or a key.
    What is the same for all models of a connection is printed once.
    """
    last_key = ""  # of the line printed last

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
        nonlocal last_key
        line = printable(_line(target, name, about, event))
        # Only the first reason to wait: others follow from it.
        key = event.kind if event.kind == "waiting" else line
        if event.kind not in OF_CONNECTION or key != last_key:
            print(line, file=sys.stderr, flush=True)
        last_key = key

    return report


def _line(
    target: JoinTarget, name: str, about: Mapping[str, object], event: WorkerEvent
) -> str:
    """Return an event as a line for people."""
    url = target.display_url or "its fleet"
    reason = without_url(event.reason, url)
    if event.kind == "refused":
        found = target.token_file
        source = f" (that of {found})" if found and "--token" in reason else ""
        return f"shoal join: {url}: {reason}{source}"
    if event.kind == "waiting":
        advice = f" ({target.advice})" if target.advice else ""
        return f"waiting for {url}: {reason}{advice}"
    if event.kind in ("paused", "resumed"):
        return f"{event.kind} {name}{f': {reason}' if reason else ''}"
    if event.kind == "loading":
        return f"loading {about['model']} {reason}"
    if event.kind == "lending":
        return f"{about['model']}: {reason}"
    if event.kind == "failed":
        return f"cannot load {about['model']}: {reason}"
    if event.kind in OF_CONNECTION:
        aborting = event.kind == "leaving" and sys.stderr.isatty()
        hint = "; Ctrl-C again stops at once" if aborting else ""
        return f"{event.kind} {name}: {event.reason}{hint}"
    kind, subject = next(iter(about.items()))
    # The first line listed them; later ones are read for the reason.
    if isinstance(subject, list) and event.kind != JOINED and len(subject) > 1:
        subject = f"{len(subject)} {kind}"
    elif isinstance(subject, list):
        subject = f"{kind} {_some(subject) or 'that clients send'}"
    elif kind != "model":
        subject = f"{kind.replace('_', ' ')} {subject}"
    reason = f": {event.reason}" if event.reason else ""
    return f"{event.kind} {name} with {subject}{reason}"


def without_url(reason: str, url: str) -> str:
    """Return a reason without the URL before it, for a line that has that already."""
    for known in (f"{url}: ", f"{url} ", f"cannot connect to {url}: "):
        reason = reason.removeprefix(known)
    return reason


def report_omitted_models(offered: Sequence[str], others: Sequence[str]) -> None:
    """Print which models the wire cannot carry, and how to offer them."""
    listed = _some(others)
    line = (
        f"only {', '.join(offered)} is offered, because the protocol carries no more; "
        f"to offer another ({listed}), join with --model under another --name"
    )
    print(printable(line), file=sys.stderr, flush=True)


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:LISTED_MAX])
    if len(names) > LISTED_MAX:
        listed += f" and {len(names) - LISTED_MAX} more"
    return listed


class ModelLoader:
    """Loads the models of embedded engines, one after another.

    Several at once would take longer: each reads a large file.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._turn = asyncio.Lock()

    async def load(self, source: EngineSource) -> None:
        """Load the model of an engine.  Raises ConfigError if that fails."""
        assert source.file is not None, "only engines with a file are unloaded"
        async with self._turn:
            with self._shown(source.engine.models[0].name, source.file):
                await source.engine.start()

    @contextmanager
    def _shown(self, name: str, file: Path) -> Iterator[None]:
        """Show within the block that a model is loaded."""
        size = model_size(file)
        text = f"loading {printable(name)} ({decimal(size)})"
        if self._as_json:
            loading = {"event": "loading", "model": name, "bytes": size}
            print(json.dumps(loading), flush=True)
            yield
        elif not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
            yield
        else:
            with _progress(text):
                yield


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show a text and the elapsed time on the terminal, within the block."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        progress.add_task(text, total=None)
        yield
