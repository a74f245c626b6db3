"""``shoal models``: pull, copy, add, list, alias and delete models.

A model is copied from a coordinator, or from a peer of another program.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import click
from rich.filesize import decimal

from shoal.app.model_port import port_towards
from shoal.cli import terminal
from shoal.cli.command_loop import run_loop
from shoal.cli.log import log_options, log_to_stderr
from shoal.cli.options import json_option, pass_api_with_json
from shoal.cli.use.models import alias, deployments, pull, stored
from shoal.cli.worker.join_target import resolve_target, split_token
from shoal.client.coordinator import CoordinatorApi
from shoal.config import data_folder
from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.engines.gguf_files import find_models, model_folders
from shoal.models.download import DownloadedModel, DownloadRequest
from shoal.models.fetch import fetch_model
from shoal.models.file_hashes import FileHashes
from shoal.models.library import stored_model
from shoal.models.names import check_model_name
from shoal.models.peer_connection import WEB, DialledPeer
from shoal.models.staging import UNANNOUNCED_MAX
from shoal.models.trained import add_trained_model
from shoal.transports.clock import LoopClock

FOUND: terminal.Columns = {"PEER": "peer", "SIZE": "size", "FROM": "address"}
ADDRESSES_HINT = (
    "these peers connected by themselves: `dns-sd -B _teale._tcp` or "
    "`avahi-browse -rt _teale._tcp` lists their addresses, for shoal models get --from"
)
SHARE = "shoal serve --share NAME=PATH, or shoal join --model NAME=PATH, where it is"
EXIT_STOPPED = 130
PEERS = ("tcp", "tls")


@click.group("models")
def command() -> None:
    """Download models, copy them from peers, add trained ones, list and delete them.

    NAME is the name of a model, such as qwen3-8b or org/name.
    """


command.add_command(pull.command)
command.add_command(stored.list_)
command.add_command(stored.show_)
command.add_command(stored.remove)
command.add_command(alias.command)
command.add_command(deployments.deploy)
command.add_command(deployments.undeploy)
command.add_command(deployments.list_)


@command.command("find")
@click.argument("name")
@pass_api_with_json
def find(api: CoordinatorApi, name: str, as_json: bool) -> int:
    """Ask all peers of a coordinator for a model."""
    name = _model_name(name)
    found = api.request(f"/admin/models/{quote(name)}")
    own = api.http_url
    rows = [_found_row(each, own) for each in found["data"]]
    peers = "1 peer" if found["asked"] == 1 else f"{found['asked']} peers"
    nothing = f"no peer shares {name} ({peers} queried); to share it: {SHARE}"
    terminal.show_table(found, as_json, FOUND, rows, nothing)
    if rows and not as_json:
        first = next((each["address"] for each in rows if each["address"]), None)
        copy = f"to copy it: shoal models get {name} --from {first}"
        click.echo(ADDRESSES_HINT if first is None else copy + _secret(first, own))
    return 0 if rows else 1


@command.command("get")
@click.argument("name")
@click.option(
    "--from",
    "where",
    multiple=True,
    metavar="WHERE",
    help="URL of a coordinator, as for `shoal join`: http://HOST:PORT, or "
    "https://; repeatable: each sends a part.  With --plain, HOST:PORT of a peer of "
    "another program.  Default: the coordinator that `shoal join` finds.",
)
@click.option(
    "--address",
    default="",
    metavar="SHA256",
    help="Content address that the model must have: sha256:…, as --json shows it.",
)
@click.option(
    "--passcode",
    default="",
    envvar="SHOAL_PASSCODE",
    show_envvar=True,
    metavar="PASSCODE",
    help="Passcode of the pools, or of the other peer's cluster, if it has one.",
)
@click.option(
    "--token",
    default="",
    envvar="SHOAL_TOKEN",
    show_envvar=True,
    metavar="TOKEN",
    help="Join token of the coordinator, as for `shoal join`.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Connection without encryption, to a peer of another program.",
)
@click.option("--replace", is_flag=True, help="Replace an existing copy.")
@click.option(
    "--seed/--no-seed",
    default=True,
    show_default=True,
    help="Send others that copy the model at the same time what has arrived, at a port "
    "of its own, and get what they have.",
)
@click.option(
    "--unannounced-max",
    type=click.FloatRange(min=0, min_open=True),
    default=UNANNOUNCED_MAX / 1e9,
    show_default=True,
    metavar="GB",
    help="Size limit of a model whose size the peer does not announce.",
)
@stored.folder_option("--to")
@json_option
@log_options("warning")
def get(
    name: str,
    where: tuple[str, ...],
    address: str,
    passcode: str,
    token: str,
    plain: bool,
    replace: bool,
    seed: bool,
    unannounced_max: float,
    folder: Path | None,
    as_json: bool,
    log_level: str,
    log_format: str,
) -> int:
    """Copy a model from coordinators, or another peer on the local network.

    A copy that was interrupted goes on where it ended.
    """
    log_to_stderr(log_level, log_format)
    model, to, data = _model_name(name), stored.models_folder(folder), data_folder()
    whole = DownloadRequest(model, to, replace, int(unannounced_max * 1e9))
    given = [CopySource(each, passcode, token, plain=plain) for each in where]
    for source in given:
        source.check()

    async def copy(stop: asyncio.Event) -> int:
        def on_progress(done: int, size: int | None) -> None:
            update(completed=done, total=size)

        sources = [each.peer for each in given] or [await _own_pool(token, data)]
        clock = LoopClock()
        began = clock.now()
        with terminal.transfer_progress(model, hidden=as_json) as update:
            async with asyncio.TaskGroup() as tasks:
                download = tasks.create_task(
                    fetch_model(
                        *(model, sources, to),
                        address=address,
                        replace=replace,
                        progress=on_progress,
                        donors=find_models(model_folders(data)),
                        hashes=FileHashes(data),
                        whole=whole,
                        open_port=port_towards(sources[0].url) if seed else None,
                    )
                )
                canceller = tasks.create_task(_cancel_on_stop(stop, download))
                download.add_done_callback(lambda _: canceller.cancel())
        if download.cancelled():
            return EXIT_STOPPED
        got = download.result()
        copied = stored_model(got.path, model)
        seconds = round(clock.now() - began, 3)
        shown = stored.stored_json(copied) | {"seconds": seconds}
        shown["address"] = got.address
        terminal.show(shown, as_json, *stored.stored_lines(copied))
        return 0

    return run_loop(copy)


@command.command("add")
@click.argument("name")
@click.argument("trained", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--bytes", "of_bytes", is_flag=True, help="Tokens are bytes: no tokenizer.json."
)
@click.option("--replace", is_flag=True, help="Replace an existing model.")
@stored.folder_option("--to")
@json_option
def add(
    name: str,
    trained: Path,
    of_bytes: bool,
    replace: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Add a trained model, as a file for `shoal join`.

    NAME is its name here; FOLDER is that of a Llama model: config.json, *.safetensors,
    tokenizer.json.
    """
    added = add_trained_model(
        stored.models_folder(folder),
        _model_name(name),
        trained.expanduser(),
        of_bytes=of_bytes,
        replace=replace,
    )
    terminal.show(stored.stored_json(added), as_json, *stored.stored_lines(added))


async def _own_pool(token: str, data: Path) -> DialledPeer:
    """Return the coordinator that a worker on this machine would join.

    Raises ConfigError if there is none.
    """
    target = await resolve_target("", "auto", token, data)
    return DialledPeer(target.http_url, target.token, fingerprint=target.fingerprint)


def _secret(address: str, own: str) -> str:
    """Return the option with which a model is copied from an address."""
    if address == own:
        return " --token JOIN_TOKEN"
    is_pool = address.partition("://")[0] in WEB
    return " --passcode PASSCODE" if is_pool else " --passcode PASSCODE --plain"


def _found_row(copy: dict[str, Any], own: str) -> dict[str, str]:
    """Return the row of a copy: its peer, size, and address to copy it from."""
    address = own if copy["passed_on"] else copy["address"]
    return {
        "peer": terminal.format_peer(copy["name"], copy["peer"]) or "this coordinator",
        "size": "" if copy["size"] is None else decimal(copy["size"]),
        "address": address.removeprefix("tcp://"),
    }


async def _cancel_on_stop(
    stop: asyncio.Event, download: asyncio.Task[DownloadedModel]
) -> None:
    await stop.wait()
    download.cancel()


def _model_name(name: str) -> str:
    try:
        return check_model_name(name)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True)
class CopySource:
    """Where to copy a model from, as the command line gives it.

    ``where`` is the URL of a coordinator or HOST:PORT; ``plain``: the connection is not
    encrypted, as to peers of other programs.
    """

    where: str
    passcode: str = field(repr=False)
    token: str = field(repr=False)
    plain: bool

    @property
    def url(self) -> str:
        """Where to connect to, with a scheme.

        HOST:PORT is a coordinator's, unless the connection is ``plain``: with HTTPS, if
        the token names a certificate.
        """
        if "://" in self.where:
            return self.where
        _, fingerprint = split_token(self.token)
        web = "http" if fingerprint is None else "https"
        return f"{'tcp' if self.plain else web}://{self.where}"

    @property
    def peer(self) -> DialledPeer:
        """The peer to connect to."""
        token, fingerprint = split_token(self.token)
        guessed = "://" not in self.where and not self.plain
        advice = "; a peer of another program, such as a Mac, needs --plain"
        return DialledPeer(
            *(self.url, token, self.passcode, self.plain, fingerprint),
            advice=advice if guessed else "",
        )

    @property
    def is_pool(self) -> bool:
        """Whether it is a coordinator of Shoal's."""
        return self.url.partition("://")[0] in WEB

    def check(self) -> None:
        """Raise ConfigError unless it has a host, and a peer's address a port."""
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in (*WEB, *PEERS) and bool(parts.hostname)
            is_url = self.is_pool and "://" in self.where
            valid = valid and (parts.port is not None or is_url)
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"--from {self.where}: expected the URL of a coordinator, such as "
                "http://HOST:4010, or HOST:PORT of another peer"
            )
        if not (self.is_pool or self.plain):
            raise ConfigError(
                f"--from {self.where}: the connection to a peer of another program is "
                "not encrypted; to use it anyway, give --plain"
            )
