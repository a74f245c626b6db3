"""The child process of the embedded engine, which runs llama.cpp's server in isolation.

A fault in native code ends this process and not the worker.  The engine starts it as
``python -m shoal.engines.llama_child`` and writes one line of JSON, a ``ModelToOpen``;
the child replies with one line, a ``ServerOpened`` or ``OpenFailed``.  It exits when
its standard input is closed, so it never outlives the engine.
"""

import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from shoal.domain.errors import ConfigError
from shoal.domain.work import JobKind
from shoal.engines.gguf_files import kinds_of
from shoal.engines.server_kinds import RERANKINGS, TEXT
from shoal.processes.programs import claim_pipes, write_all

LOG_VERBOSITY = 2  # of llama.cpp's levels of verbosity: errors and warnings
BATCH_TOKENS = 512  # of a prompt, read at a time: an abort takes effect between them
MODEL = "model"  # its name on this server, which has only one


class ModelToOpen(msgspec.Struct, frozen=True):
    """A GGUF file, and how to serve it.

    ``projector`` is the file that makes its images or audio tokens; empty: none.
    ``context`` is in tokens per slot.  Each of ``requests`` that the server handles at
    a time, running or waiting for a slot, takes a thread.
    """

    path: str
    projector: str
    slots: int
    context: int
    threads: int
    requests: int


class ServerOpened(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, for these kinds of work.

    The server is on a loopback port, which all users of the machine can reach:
    requests need the ``key``.
    """

    url: str
    key: str
    kinds: frozenset[JobKind]


class OpenFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be opened; llama.cpp logs why to standard error."""

    reason: str


Reply: TypeAlias = ServerOpened | OpenFailed


def main() -> None:
    # Ctrl-C reaches the whole process group; the engine decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands, replies = claim_pipes()
    with os.fdopen(commands, "rb") as engine:
        if not (line := engine.readline()):
            os._exit(0)
        key = secrets.token_urlsafe(32)
        model = msgspec.json.decode(line, type=ModelToOpen)
        try:
            kinds = kinds_of(Path(model.path))
            server = open_server(model, kinds, key)
        except (RuntimeError, ImportError, OSError, ConfigError) as error:
            reply(replies, OpenFailed(str(error)))
            sys.exit(1)
        reply(replies, ServerOpened(f"{server.listening_address}/v1", key, kinds))
        engine.read()
        # Threads may be blocked in native code, so do not wait for them.
        os._exit(0)


def reply(pipe: int, message: Reply) -> None:
    """Send the reply; exit if the engine has ended."""
    try:
        write_all(pipe, msgspec.json.encode(message) + b"\n")
    except OSError:
        os._exit(0)


def open_server(model: ModelToOpen, kinds: frozenset[JobKind], key: str) -> Any:
    """Load the model, and serve it until the returned object is deleted.

    Raises RuntimeError if llama.cpp cannot open it.
    """
    import xllamacpp  # 100 MB of native code: only the child loads it

    params = xllamacpp.CommonParams()
    # llama.cpp would run a program on what it cannot decode as an image: ffprobe.
    os.environ["PATH"] = os.devnull
    params.model.path = model.path
    params.mmproj.path = model.projector
    params.model_alias = {MODEL}
    params.n_parallel = model.slots
    # Divided among slots; llama.cpp limits each to the model's training size.
    params.n_ctx = model.slots * model.context
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    if kinds != TEXT:
        params.embedding = True
        # Each input must fit into one batch.
        params.n_batch = params.n_ubatch = model.context
    if kinds == RERANKINGS:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    params.cpuparams.n_threads = model.threads
    params.cpuparams_batch.n_threads = model.threads
    params.verbosity = LOG_VERBOSITY
    params.warmup = False
    # Otherwise llama.cpp caches finished prompts in up to 8 GiB of memory.
    params.cache_ram_mib = 0
    params.api_keys = [key]
    params.endpoint_slots = False
    params.ui = False
    params.n_threads_http = model.requests
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
