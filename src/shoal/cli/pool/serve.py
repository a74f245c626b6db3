"""``shoal serve``: run a coordinator, one endpoint for all workers that join it."""

import asyncio
import errno
import gc
import json
import logging
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from shoal.app import parts
from shoal.app.front import run_front
from shoal.app.network import PortsByWire
from shoal.app.node import Node, check_node
from shoal.app.server import RunningCoordinator, preload, run_coordinator
from shoal.cli.command_loop import run_loop
from shoal.cli.local.db import newest_backup
from shoal.cli.log import LOG_FILE, log_options, log_to_file, log_to_stderr
from shoal.cli.options import (
    SettingsCommand,
    config_file_option,
    given,
    setting_options,
    wire_options,
)
from shoal.config import USER_DATA, ServeConfig, X402Config
from shoal.config.loader import check_file, load
from shoal.config.private_files import make_private_folder
from shoal.config.secret_files import KEY_FILE
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import ConfigError, Fenced, InUse, StoreBroken
from shoal.front.linked_jobs import OtherVersion
from shoal.gateway.accounts.invitations import PRINTED_USES
from shoal.processes.programs import allow_files, name_process
from shoal.protocols import discover
from shoal.protocols.seam.endpoints import ListenerTls, bare_label
from shoal.transports.clock import LoopClock
from shoal.transports.http_server import public_url

PLAIN = ListenerTls.NONE.value  # the label of a wire's only port
STDERR = "-"  # in place of a log file
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SPACE_MIN = 16 << 20  # bytes: SQLite's files, and the leases of jobs that were open
LOOK_EVERY = 1.0  # seconds between looks at a full disk
SWITCH_INTERVAL = 0.5e-3  # seconds for which other threads may keep the loop waiting

log = logging.getLogger("shoal.cli")


@click.command("serve", cls=SettingsCommand)
@setting_options(ServeConfig, "serve", "this coordinator")
@wire_options(discover())
@setting_options(X402Config, "x402", "payments for jobs")
@config_file_option
@log_options("info")
@click.option(
    "--log-file",
    metavar="FILE",
    envvar="SHOAL_LOG_FILE",
    show_envvar=True,
    help=f"Log file, at most 40 MB with its older copies; {STDERR}: standard error.  "
    f"Default: {LOG_FILE} in the data folder, at a terminal without --log-level; "
    "otherwise standard error.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    config_file: Path,
    log_level: str,
    log_format: str,
    log_file: str | None,
    as_json: bool,
    **values: object,
) -> int:
    """Run a coordinator: one endpoint for all workers that join it."""
    log_to_stderr(log_level, log_format)
    check_file(config_file, {"serve", "join", "x402", *discover()})
    flags = given(values, ServeConfig, "serve")
    config = load(ServeConfig, "serve", flags, config_file)
    wires = {
        name: load(
            protocol.config, name, given(values, protocol.config, name), config_file
        )
        for name, protocol in discover().items()
    }
    parts.check_fronts(config.fronts)
    check_node(config)
    x402 = load(X402Config, "x402", given(values, X402Config, "x402"), config_file)

    async def serve(stop: asyncio.Event) -> int:
        _make_data_folder(config.data_dir)
        await wait_for_space(config.data_dir, stop)
        if stop.is_set():
            return 0
        log_path = _log_path(log_file, config, as_json=as_json)
        if log_path is not None:
            log_to_file(log_path, log_level, log_format)
        allow_files()
        if isinstance(part, parts.FrontPart):
            name_process(parts.FRONT_NAME)
            return await _serve_front(config, wires, part, stop)
        if part is None and config.fronts:
            return await parts.run_parts(config, stop)
        node = None
        if part is not None:
            name_process(parts.HUB_NAME)
            node = Node(config, part, LoopClock()) if config.node else None
        while not await _stood_by(node, stop, as_json=as_json):
            try:
                return await serve_pool(part, node, log_path, stop)
            except InUse:  # another node was faster
                if node is None:
                    raise
        return 0

    async def serve_pool(
        part: parts.HubPart | None,
        node: Node | None,
        log_path: Path | None,
        stop: asyncio.Event,
    ) -> int:
        _tune_garbage_collector()  # before the store's objects come into being
        async with run_coordinator(config, wires, x402, part, node) as running:
            gc.freeze()
            sys.setswitchinterval(SWITCH_INTERVAL)
            handed_over = asyncio.Event()
            if part is not None:
                _hand_over_at_sighup(running, handed_over, stop)
                parts.report_serving()
            # No token in a log: a service may restart all day.
            shown = as_json or sys.stdout.isatty()
            if part is None or part.announces:
                join = await running.invite() if shown else ""
                _announce(running, config, join, log_path, as_json=as_json)
            await stop.wait()
            to_others = node is not None and not await node.is_alone()
            if to_others:
                running.hand_over()
            elif not handed_over.is_set():
                click.echo("stopping: waiting for open jobs", err=True)
        if node is not None and to_others and not handed_over.is_set():
            await node.hand_over()
        if part is not None:
            parts.remove_sockets(part)
        return 0

    part = parts.this_part()
    if isinstance(part, parts.HubPart) and part.stands_by:
        preload(config)
        name_process(parts.STANDBY_NAME)
        if not parts.wait_turn():
            return 0
    try:
        return run_loop(serve)
    except Fenced as error:
        if not config.node:
            raise
        log.warning("%s", error)
        return 1  # the first process starts another, which stands by
    except StoreBroken as error:
        what_to_do = _what_to_do(config)
        raise StoreBroken(f"{error}: {what_to_do}", error.path) from error


async def _stood_by(node: Node | None, stop: asyncio.Event, *, as_json: bool) -> bool:
    """Stand by while another node has the pool; return whether until ``stop``."""
    if node is None:
        return False

    def on_standby(other: str) -> None:
        parts.report_serving()
        url = node.all_urls[0]
        if as_json:
            click.echo(json.dumps({"event": "standby", "url": url, "pool": other}))
        else:
            click.echo(f"Standing by at {url}: the node {other} has the pool")

    return not await node.stand_by(stop, on_standby)


def _hand_over_at_sighup(
    running: RunningCoordinator, handed_over: asyncio.Event, stop: asyncio.Event
) -> None:
    """Let another process take over when this one gets a SIGHUP."""

    def hand_over() -> None:
        running.hand_over()
        handed_over.set()
        stop.set()

    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hand_over)


async def _serve_front(
    config: ServeConfig,
    wires: Mapping[str, object],
    part: parts.FrontPart,
    stop: asyncio.Event,
) -> int:
    """Be a front until the hub ends after ``stop``; return the exit status."""
    async with run_front(config, wires, part, stop) as link:
        _tune_garbage_collector()
        try:
            await link
        except OtherVersion as error:
            log.error("the front ends: %s", error)
            return 1
    return 0


async def wait_for_space(
    folder: Path, stop: asyncio.Event, needed: int = SPACE_MIN
) -> None:
    """Wait until the disk of a folder has ``needed`` bytes free, or until ``stop``.

    A coordinator that was killed on a full disk cannot even read its database: SQLite
    needs files beside it.  An exit would leave the healing to a supervisor, which gives
    up after a few starts.
    """
    waits = False
    while (free := _free(folder)) < needed and not stop.is_set():
        if not waits:
            log.error(
                "waiting to start: --data-dir %s has %.1f MB free, and a start needs "
                "%.1f MB: free some space, and the start continues by itself, or stop "
                "and choose a folder on another disk",
                *(folder, free / 1e6, needed / 1e6),
            )
            waits = True
        try:
            async with asyncio.timeout(LOOK_EVERY):
                await stop.wait()
        except TimeoutError:
            continue
    if waits and not stop.is_set():
        log.warning("%.1f MB are free: starting", free / 1e6)


def _free(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    for each in (folder, *folder.absolute().parents):
        if each.exists():
            return shutil.disk_usage(each).free
    raise AssertionError("the root exists")


def _what_to_do(config: ServeConfig) -> str:
    """Return how to recover from a broken database."""
    folder = config.data_dir
    where = _data_dir_option(folder)
    if config.store:
        return (
            f"check for damage with `shoal db check{where} --store URL`, and give "
            "--store the right database, or restore a backup with `pg_restore`; `shoal "
            "serve --new-log` continues with what is left, and signs receipts with a "
            "new key"
        )
    backup = newest_backup(folder)
    which, file = "a backup", "FILE"
    if backup is not None:
        which, file = "the newest backup", shlex.quote(str(backup))
    return (
        f"check for damage with `shoal db check{where}`, and put the right database "
        f"back, or restore {which} with `shoal db restore {file}{where}`; `shoal serve "
        "--new-log` continues with what is left, and signs receipts with a new key"
    )


def _data_dir_option(folder: Path) -> str:
    """Return the option that names a data folder; empty for the user's own."""
    return "" if folder == USER_DATA else f" --data-dir {shlex.quote(str(folder))}"


def _log_path(given: str | None, config: ServeConfig, *, as_json: bool) -> Path | None:
    """Return the file of the log; None: standard error.

    The one in the data folder needs the folder, which is created.  Raises ConfigError.
    """
    if given is not None:
        return None if given == STDERR else Path(given).expanduser()
    source = click.get_current_context().get_parameter_source("log_level")
    watched = sys.stdout.isatty() and sys.stderr.isatty() and not as_json
    if not watched or source is ParameterSource.COMMANDLINE:
        return None
    _make_data_folder(config.data_dir)
    return config.data_dir / LOG_FILE


def _make_data_folder(folder: Path) -> None:
    """Create the data folder, unless the disk is full: a start waits for space.

    Raises ConfigError if it cannot be created, as below /proc, which has no space.
    """
    try:
        make_private_folder(folder)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error


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
    running: RunningCoordinator,
    config: ServeConfig,
    join: str,
    log_path: Path | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        ready = {
            "event": "ready",
            "url": running.url,
            "api_key": running.api_key,
            "join": join,
            "dashboard": running.dashboard,
            "ports": {"http": running.port, **_further_ports(running)},
        }
        if running.pinned_key:
            ready["pinned_key"] = running.pinned_key
        if running.authority is not None:
            ready["authority"] = str(running.authority)
        click.echo(json.dumps(ready))
        return
    # The folder in which `shoal chat` on this machine finds the key.
    where = _data_dir_option(config.data_dir)
    if sys.stdout.isatty():
        key = running.api_key
        ways = (
            f"Dashboard: {running.dashboard}\n"
            f"  The link signs in once, within an hour; `shoal dashboard{where}` makes "
            "another.\n\n"
            f"Add a machine:\n  {join}\n  {_token_remark(config)}"
            f"`shoal join-line{where}` prints a command again.\n"
            f"{_join_remark(config, where)}"
        ).rstrip()
    else:  # a log, which others may read
        key = f"in {config.data_dir / KEY_FILE}"
        ways = (
            f"Dashboard: `shoal dashboard{where}` makes a link that signs in.\n\n"
            f"Add a machine: `shoal join-line{where}` prints the command.\n"
            f"{_join_remark(config, where)}"
        ).rstrip()
    click.echo(
        f"Shoal is ready at {running.url}\n\n"
        f"  base URL   {running.url}/v1\n"
        f"  API key    {key}\n"
        f"{_ollama_line(running, config)}\n"
        f"{ways}\n\n"
        f"Chat with a model:\n  shoal chat{where}" + "".join(_trust_lines(running))
    )
    if config.ollama_open:
        click.echo("\nAnyone may use Ollama's API without a key (--ollama-open).")
    if config.approve_nodes:
        click.echo("\nA new machine gets no work until `shoal nodes approve NAME`.")
    if config.relay_open:
        click.echo("\nAny node may use the relay (--relay-open).")
    if log_path is not None:
        click.echo(f"\nLog: {log_path}")


def _join_remark(config: ServeConfig, where: str) -> str:
    """Return the lines about where the join command works; empty if anywhere."""
    if not is_own_host(config.host):
        return ""
    return (
        f"  On this machine, `shoal join{where}` is enough.  To add others, start:\n"
        f"  shoal serve{where} --host 0.0.0.0 --tls auto\n"
    )


def _token_remark(config: ServeConfig) -> str:
    """Return the limits of the printed token; empty: it is the operator's own."""
    if config.join_token is not None:
        return ""
    return f"It adds {PRINTED_USES} machines within a day; joined machines stay.\n  "


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
    if sys.stdout.isatty():
        yield (
            "\n\nFrom another machine; the key contains the fingerprint of this "
            "coordinator, so no other server ever gets it:\n"
            f"  export SHOAL_URL={running.url}\n"
            f"  export SHOAL_API_KEY={running.pinned_key}"
        )
    if running.authority is None:
        return
    file = shlex.quote(str(running.authority))
    name = running.authority.name
    yield (
        f"\n\nOther programs need a copy of {file}:\n"
        f"  curl       curl --cacert {name} {running.url}/v1/models "
        '-H "Authorization: Bearer KEY"\n'
        f"  OpenAI     SSL_CERT_FILE={name} python your_program.py\n"
        f"             or OpenAI(http_client=httpx.Client(verify="
        f'ssl.create_default_context(cafile="{name}")))\n'
        f"  Node.js    NODE_EXTRA_CA_CERTS={name} node your_program.js\n"
        f"  browsers   import {name} as an authority for web sites"
    )
