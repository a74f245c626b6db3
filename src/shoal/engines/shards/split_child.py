"""The child process that runs llama.cpp's own server for a model in several shards.

It speaks with the engine as the embedded engine's child does (``engines/llama_child``):
one line of JSON, a ``ModelToOpen``, and one reply.  Its one argument says how the model
is split.  It exits when its standard input is closed or the server ends, and in the
same way as the server; neither outlives the engine.
"""

import ctypes
import http.client
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from shoal.domain.errors import ConfigError
from shoal.domain.work import JobKind
from shoal.engines.engine_child import BY_SIGNAL
from shoal.engines.gguf_files import kinds_of
from shoal.engines.llama_child import (
    LOG_VERBOSITY,
    MODEL,
    ModelToOpen,
    OpenFailed,
    ServerOpened,
    reply,
)
from shoal.engines.server_kinds import RERANKINGS, TEXT
from shoal.engines.shards.programs import CPU, program_environment
from shoal.processes.programs import claim_pipes

POLL = 0.05  # seconds between questions whether the model is loaded
POLL_TIMEOUT = 10.0  # seconds for an answer
ALL_LAYERS = 999  # more than any model has

OPTIONAL = (
    ("--fit", "off"),  # it would change these options
    ("--no-ui",),
    ("--no-slots",),
    ("--offline",),
    ("--cache-ram", "0"),  # finished prompts would take up to 8 GiB of memory
    ("--no-warmup",),
)
"""Options that not every version has."""


class SplitOptions(msgspec.Struct, frozen=True):
    """How many ``layers`` of a model each machine has, of which the last is this one.

    The others' shards are reached at loopback ``ports``, and ``device`` is the first
    one of this machine, as rpc-server calls it.  ``batch`` is how many tokens of a
    prompt are read at a time.
    """

    program: str
    device: str
    ports: tuple[int, ...]
    layers: tuple[int, ...]
    batch: int


def main() -> None:
    # Ctrl-C reaches the whole process group; the engine decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    split = msgspec.json.decode(sys.argv[1], type=SplitOptions)
    commands, replies = claim_pipes()
    with os.fdopen(commands, "rb") as engine:
        if not (line := engine.readline()):
            return
        key = secrets.token_urlsafe(32)
        model = msgspec.json.decode(line, type=ModelToOpen)
        try:
            kinds = kinds_of(Path(model.path))
            server = start(command_of(split, model, kinds), key)
        except (OSError, ConfigError) as error:
            reply(replies, OpenFailed(str(error)))
            sys.exit(1)
        waiting = threading.Thread(
            target=await_server, args=[server, replies, key, kinds], daemon=True
        )
        waiting.start()
        try:
            engine.read()
        finally:
            server.kill()


def start(command: Sequence[str], key: str) -> "subprocess.Popen[bytes]":
    """Start the server, which ends with this process where the system allows it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=program_environment(LLAMA_API_KEY=key),
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )


def die_with_parent() -> None:
    """Have this process end when its parent does (prctl(2)), without a core dump."""
    if sys.platform != "linux":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def command_of(
    split: SplitOptions, model: ModelToOpen, kinds: frozenset[JobKind]
) -> Sequence[str]:
    """Return the server's command; ``llama_child.open_server`` says why."""
    batch = split.batch if kinds == TEXT else model.context
    options = {
        "--model": model.path,
        "--alias": MODEL,
        "--host": "127.0.0.1",
        "--port": 0,
        "--rpc": ",".join(f"127.0.0.1:{port}" for port in split.ports),
        **placement(split),
        "--parallel": model.slots,
        "--ctx-size": model.slots * model.context,
        "--batch-size": batch,
        "--ubatch-size": batch,
        "--threads": model.threads,
        "--threads-batch": model.threads,
        "--threads-http": model.requests,
        "--log-verbosity": LOG_VERBOSITY,
    }
    command = [split.program]
    for name, value in options.items():
        command += [name, str(value)]
    if model.projector:
        command += ["--mmproj", model.projector, "--no-mmproj-offload"]
    if kinds != TEXT:
        command += ["--embeddings"]
    if kinds == RERANKINGS:
        command += ["--reranking", "--pooling", "rank"]
    known = subprocess.run(
        [split.program, "--help"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=program_environment(),
        check=False,
    ).stdout.decode(errors="replace")
    return command + [word for each in OPTIONAL if each[0] in known for word in each]


def has_last_layers(device: str) -> bool:
    """Return whether a device of the machine that runs a model has the last layers.

    llama.cpp gives a processor the first ones, and other devices theirs in its order of
    them, in which shards come before GPUs of this machine.
    """
    return device != CPU


def placement(split: SplitOptions) -> Mapping[str, object]:
    """Return the options that say where the layers are.

    ``has_last_layers`` says in which order the devices have them.  The output counts as
    a layer.  It stays here, because its result is large: a number for each token of the
    vocabulary.
    """
    *lent, own = split.layers
    if has_last_layers(split.device):
        return {
            "--gpu-layers": ALL_LAYERS,
            "--tensor-split": ",".join(map(str, (*lent, own + 1))),
        }
    *others, last = lent
    return {
        "--gpu-layers": sum(lent) + 1,
        "--tensor-split": ",".join(map(str, (*others, last + 1))),
        # Some models have no output of their own, and use the tokens' embeddings.
        "--override-tensor": "^output=CPU,^token_embd=CPU",
    }


def await_server(
    server: "subprocess.Popen[bytes]", replies: int, key: str, kinds: frozenset[JobKind]
) -> None:
    """Reply when the model is loaded, or cannot be; exit as the server does."""
    opened = False
    while not opened and server.poll() is None:
        if (port := port_of(server.pid)) is not None and is_loaded(port):
            reply(replies, ServerOpened(f"http://127.0.0.1:{port}/v1", key, kinds))
            opened = True
        else:
            time.sleep(POLL)
    code = server.wait()
    if code > 0 and not opened:
        reply(replies, OpenFailed(f"llama-server ended with status {code}"))
    os._exit(code if code >= 0 else BY_SIGNAL - code)


def port_of(pid: int) -> int | None:
    """Return the port on which a process listens; None: it does not yet."""
    try:
        for each in psutil.Process(pid).net_connections("tcp4"):
            if each.status == psutil.CONN_LISTEN:
                return int(each.laddr.port)
    except psutil.Error:
        pass
    return None


def is_loaded(port: int) -> bool:
    """Ask the server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=POLL_TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    main()
