"""Loads models from their files, and shows that on the terminal."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from shoal.cli.terminal import console, printable
from shoal.engines.gguf_files import model_size
from shoal.engines.selection import EngineSource


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
