"""Shoal and the gateways it is compared with, started before the same engine.

Each peer is installed by pip, at first use, into an environment of its own.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import HERE, Program, free_port, program, server

# The docstring of gateway.py names the versions too.
LITELLM = "litellm[proxy]==1.106.2"
VLLM_ROUTER = "vllm-router==0.1.17"
SLOTS = "1024"  # of Shoal's worker: the most there are, so that nothing waits
KEY = "sk-bench"


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that runs, and the worker that Shoal has before the engine."""

    name: str
    program: Program
    port: int
    worker: Program | None = None


@contextmanager
def shoal(engine: int, *options: str) -> Iterator[Gateway]:
    """Run a coordinator with a key and its database, and a worker for ``engine``.

    ``options`` are further ones of the coordinator.
    """
    quiet = ["--log-level", "warning", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        keys = ["--api-key", KEY, "--join-token", "t", "--data-dir", folder]
        with program(
            "-m", "shoal", "serve", "--port", "0", *keys, *options, *quiet
        ) as serving:
            port = serving.report["ports"]["http"]
            there = [f"http://127.0.0.1:{port}", "--token", "t"]
            runs = ["--engine", f"http://127.0.0.1:{engine}/v1", "--slots", SLOTS]
            with program("-m", "shoal", "join", *there, *runs, *quiet) as worker:
                yield Gateway("shoal", serving, port, worker)


@contextmanager
def litellm(engine: int) -> Iterator[Gateway]:
    """Run LiteLLM's proxy with a master key, no database and one process."""
    model = {
        "model": "openai/m",
        "api_base": f"http://127.0.0.1:{engine}/v1",
        "api_key": "none",
    }
    settings = {
        "model_list": [{"model_name": "m", "litellm_params": model}],
        "general_settings": {"master_key": KEY},
    }
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        json.dump(settings, config)  # which is YAML
        config.flush()
        command = [_installed("litellm", LITELLM), "--config", config.name]
        where = ["--host", "127.0.0.1", "--port", str(port)]
        with server(
            [*command, *where, "--num_workers", "1"],
            f"http://127.0.0.1:{port}/health/liveliness",
            LITELLM_LOG="ERROR",
            LITELLM_LOCAL_MODEL_COST_MAP="True",  # else it is fetched at each start
            AIOHTTP_CONNECTOR_LIMIT_PER_HOST="2000",  # else 500 streams at most
            AIOHTTP_CONNECTOR_LIMIT="2000",
        ) as process:
            yield Gateway("litellm", process, port)


@contextmanager
def vllm_router(*engines: int, policy: str = "round_robin") -> Iterator[Gateway]:
    """Run vllm-router, by default with its cheapest policy."""
    port, metrics = free_port(), free_port()
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    behind = ["--worker-urls", *urls, "--policy", policy]
    ports = ["--port", str(port), "--prometheus-port", str(metrics)]
    command = [_installed("vllm-router", VLLM_ROUTER), *behind, *ports]
    health = f"http://127.0.0.1:{port}/health"
    with server([*command, "--log-level", "warning"], health) as process:
        yield Gateway("vllm-router", process, port)


def environment(name: str, requirement: str, *beside: str) -> str:
    """Return the path of the Python of an environment that has a peer."""
    folder = HERE / f".venv-{name}"
    done = folder / f"{requirement}.installed"
    python = folder / "bin" / "python"
    if not done.exists():
        print(f"installing {requirement}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, requirement, *beside], check=True)
        done.touch()
    return str(python)


def _installed(name: str, requirement: str) -> str:
    """Return the path of a peer's program."""
    return str(Path(environment(name, requirement)).with_name(name))
