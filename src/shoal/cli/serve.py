"""Run a coordinator: one endpoint for all workers that join it."""

import argparse
import asyncio
import gc
import json
import shlex
import sys
from collections.abc import Iterator

from shoal.app.fleet_files import with_fleet
from shoal.app.free_space import wait_for_space
from shoal.app.network import PortsByWire
from shoal.app.server import RunningCoordinator, run_coordinator
from shoal.cli.arguments import add_config, add_config_file, given_flags
from shoal.cli.command_loop import add_log_arguments, log_to_stderr, run_loop
from shoal.config import USER_DATA, ServeConfig, X402Config
from shoal.config.loader import check_file, load
from shoal.protocols import discover
from shoal.protocols.seam.endpoints import ListenerTls, bare_label
from shoal.transports.http_server import public_url

PLAIN = ListenerTls.NONE.value  # the label of a wire's only port
SWITCH_INTERVAL = 0.5e-3  # seconds for which other threads may keep the loop waiting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, ServeConfig, "serve")
    for name, protocol in discover().items():
        add_config(parser, protocol.config, name)
    add_config(parser, X402Config, "x402")
    add_config_file(parser)
    add_log_arguments(parser, "info")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line"
    )


def run(args: argparse.Namespace) -> int:
    log_to_stderr(args)
    check_file(args.config, {"serve", "join", "x402", *discover()})
    config = load(
        ServeConfig, "serve", given_flags(args, ServeConfig, "serve"), args.config
    )
    wires = {
        name: with_fleet(
            load(
                protocol.config,
                name,
                given_flags(args, protocol.config, name),
                args.config,
            ),
            protocol.fleets,
            config.data_dir,
        )
        for name, protocol in discover().items()
    }

    x402 = load(X402Config, "x402", given_flags(args, X402Config, "x402"), args.config)

    async def serve(stop: asyncio.Event) -> int:
        await wait_for_space(config.data_dir, stop)
        if stop.is_set():
            return 0
        async with run_coordinator(config, wires, x402) as running:
            _tune_garbage_collector()
            sys.setswitchinterval(SWITCH_INTERVAL)
            _announce(running, config, as_json=args.json)
            await stop.wait()
            print("stopping: waiting for open jobs", file=sys.stderr)
        return 0

    return run_loop(serve)


def _tune_garbage_collector() -> None:
    """Collect garbage cycles less often, and not among permanent objects.

    Requests leave few cycles; the default threshold, 700 objects, cost 4 % of the time.
    A worker's connection leaves a hundred objects in cycles, and its buffers with them:
    where the older generations wait for more objects, hundreds of megabytes of those
    pile up.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 3, 5)


def _further_ports(running: RunningCoordinator) -> dict[str, int]:
    ports = _flat(running.ports)
    if running.ollama_port is not None:
        ports["ollama"] = running.ollama_port
    return ports


def _flat(ports: PortsByWire) -> dict[str, int]:
    """Return the ports by wire, and by wire and label where a wire has several."""
    return {
        wire if label == PLAIN else f"{wire}_{bare_label(label)}": port
        for wire, labelled in ports.items()
        for label, port in labelled.items()
    }


def _announce(
    running: RunningCoordinator, config: ServeConfig, *, as_json: bool
) -> None:
    if as_json:
        ready = {
            "event": "ready",
            "url": running.url,
            "api_key": running.api_key,
            "join": running.join_command,
            "ports": {"http": running.port, **_further_ports(running)},
        }
        if running.pinned_key:
            ready["pinned_key"] = running.pinned_key
        if running.authority is not None:
            ready["authority"] = str(running.authority)
        print(json.dumps(ready), flush=True)
        return
    # The folder in which `shoal chat` on this machine finds the key.
    where = f" --data-dir {shlex.quote(str(config.data_dir))}"
    if config.data_dir == USER_DATA:
        where = ""
    print(
        f"Shoal is ready at {running.url}\n\n"
        f"  base URL   {running.url}/v1\n"
        f"  API key    {running.api_key}\n"
        f"{_ollama_line(running, config)}\n"
        f"Add a machine:\n  {running.join_command}\n\n"
        f"Chat with a model:\n  shoal chat --url {running.url}{where}"
        + "".join(_trust_lines(running)),
        flush=True,
    )
    if config.ollama_open:
        print(
            "\nAnyone may use Ollama's API without a key (--ollama-open).", flush=True
        )
    if config.relay_open:
        print("\nAny node may use the relay (--relay-open).", flush=True)


def _ollama_line(running: RunningCoordinator, config: ServeConfig) -> str:
    """Return the line about the port of Ollama's API; empty if there is none."""
    if running.ollama_port is None:
        return ""
    port, secure = running.ollama_port, running.url.startswith("https:")
    url = public_url(config.host, port, secure=secure)
    return f"  Ollama     {url}{'' if config.ollama_open else ', with the same key'}\n"


def _trust_lines(running: RunningCoordinator) -> Iterator[str]:
    """Yield how clients on other machines trust the certificate, if there is one."""
    if not running.pinned_key:
        return
    yield (
        "\n\nUse it from another machine; the key names this coordinator's TLS key, "
        "and no other server gets it:\n"
        f"  export SHOAL_URL={running.url}\n"
        f"  export SHOAL_API_KEY={running.pinned_key}"
    )
    if running.authority is None:
        return
    file = shlex.quote(str(running.authority))
    name = running.authority.name
    yield (
        f"\n\nOther programs trust it by a copy of {file}:\n"
        f"  curl       curl --cacert {name} {running.url}/v1/models "
        '-H "Authorization: Bearer KEY"\n'
        f"  OpenAI     SSL_CERT_FILE={name} python your_program.py\n"
        f"             or OpenAI(http_client=httpx.Client(verify="
        f'ssl.create_default_context(cafile="{name}")))\n'
        f"  Node.js    NODE_EXTRA_CA_CERTS={name} node your_program.js\n"
        f"  browsers   import {name} as an authority for web sites"
    )
