"""Copy models from peers, add trained ones, and list those on this machine."""

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.command_loop import add_log_arguments, log_to_stderr, run_loop
from shoal.cli.terminal import format_peer, print_table, printable
from shoal.cli.worker.join_target import direct_address, split_token
from shoal.config import USER_DATA
from shoal.domain.errors import ConfigError, InvalidRequest, Unavailable
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.models.download import DownloadedModel, DownloadRequest
from shoal.models.library import StoredModel, stored_model, stored_models
from shoal.models.names import check_model_name
from shoal.models.peer_download import download_model
from shoal.models.trained import add_trained_model
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.transports import dialer
from shoal.transports.clock import Clock, LoopClock
from shoal.transports.link import LinkClosed

MODELS = "models"  # the folder of models, in the data folder
SCHEMES = ("tcp", "tls")
FOUND_HEAD = ("PEER", "SIZE", "FROM")
ADDRESSES_HINT = (
    "these peers connected by themselves: `dns-sd -B _teale._tcp` or "
    "`avahi-browse -rt _teale._tcp` lists their addresses, for shoal models get --from"
)
SHARE = "shoal serve --share NAME=PATH, or shoal join --model NAME=PATH, where it is"
HEAD = ("NAME", "SIZE", "FILES", "WHERE")
EXIT_STOPPED = 130
REDRAW_EVERY = 0.25  # seconds
UNITS = ("B", "kB", "MB", "GB", "TB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_action(actions, "ls", "list the models in the folder")
    find = add_action(actions, "find", "ask all peers of a coordinator for a model")
    find.add_argument("name", help="name of the model, such as qwen3-8b or org/name")
    find.add_argument("--json", action="store_true", help="print JSON")
    api.add_arguments(find)
    get = add_action(actions, "get", "copy a model from a peer on the local network")
    get.add_argument(
        "name", help="name of the model at the peer, such as qwen3-8b or org/name"
    )
    get.add_argument(
        "--from",
        dest="peer",
        required=True,
        metavar="HOST:PORT",
        help="address of the peer; tls://HOST:PORT if it has a certificate",
    )
    get.add_argument(
        "--passcode",
        default=os.environ.get("SHOAL_PASSCODE", ""),
        help="passcode of the peer's cluster, if it has one [SHOAL_PASSCODE]",
    )
    get.add_argument(
        "--token",
        default=os.environ.get("SHOAL_TOKEN", ""),
        help="join token of the peer, if it is a coordinator [SHOAL_TOKEN]",
    )
    get.add_argument(
        "--plain",
        action="store_true",
        help="connection without encryption, to a peer of another program",
    )
    get.add_argument(
        "--replace", action="store_true", help="replacement of an existing copy"
    )
    add = add_action(actions, "add", "add a trained model, as a file for shoal join")
    add.add_argument("name", help="name of the model here, such as mine or org/name")
    add.add_argument(
        "trained",
        type=Path,
        metavar="FOLDER",
        help="folder of a Llama model: config.json, *.safetensors, tokenizer.json",
    )
    add.add_argument(
        "--bytes",
        action="store_true",
        help="tokens that are bytes, without a tokenizer.json",
    )
    add.add_argument(
        "--replace", action="store_true", help="replacement of an existing model"
    )
    for each in (listing, get, add):
        each.add_argument(
            "--in" if each is listing else "--to",
            dest="folder",
            type=Path,
            metavar="DIR",
            help="folder of models (default: models in the data folder)",
        )
        each.add_argument("--json", action="store_true", help="print JSON")
    add_log_arguments(get, "warning")


def run(args: argparse.Namespace) -> int:
    actions = {"add": _add, "find": _find, "get": _get, "ls": _list}
    return actions[args.action](args)


def _find(args: argparse.Namespace) -> int:
    name = _model_name(args)
    found = api.request(args, f"/admin/models/{quote(name)}")
    if args.json:
        print(json.dumps(found))
    elif not found["data"]:
        asked = "1 peer" if found["asked"] == 1 else f"{found['asked']} peers"
        print(f"no peer shares {name} ({asked} asked); to share it: {SHARE}")
    else:
        own = _own_address(args)
        rows = [_found_row(each, own) for each in found["data"]]
        print_table(FOUND_HEAD, rows)
        addresses = [address for _, _, address in rows if address]
        print(
            f"to copy it: shoal models get {name} --from {addresses[0]}"
            + (
                " --token JOIN_TOKEN"
                if addresses[0] == own.removeprefix("tcp://")
                else ""
            )
            if addresses
            else ADDRESSES_HINT
        )
    return 0 if found["data"] else 1


def _own_address(args: argparse.Namespace) -> str:
    """Return the coordinator's address for peers; empty if it has none."""
    (wire,) = (each for each in discover().values() if each.peering is not None)
    base = api.base_url(args)
    url = base if "://" in base else f"http://{base}"
    return direct_address(url, wire, api.request(args, "/healthz"))


def _found_row(copy: dict[str, Any], own: str) -> tuple[str, str, str]:
    """Return the row of a copy: its peer, size, and address to copy it from."""
    size = "" if copy["size"] is None else _bytes(copy["size"])
    address = own if copy["passed_on"] else copy["address"]
    peer = format_peer(copy["name"], copy["peer"]) or "this coordinator"
    return peer, size, address.removeprefix("tcp://")


def _model_name(args: argparse.Namespace) -> str:
    try:
        return check_model_name(args.name)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error


def _list(args: argparse.Namespace) -> int:
    folder = _folder(args)
    kept = stored_models(folder)
    if args.json:
        print(json.dumps({"data": [_as_json(each) for each in kept]}))
    elif kept:
        print_table(
            HEAD,
            [
                (each.name, _bytes(each.size), str(each.files), str(each.path))
                for each in kept
            ],
        )
    else:
        print(
            f"no models in {printable(str(folder))}: shoal models get NAME --from PEER"
        )
    return 0


def _add(args: argparse.Namespace) -> int:
    added = add_trained_model(
        _folder(args),
        _model_name(args),
        args.trained.expanduser(),
        of_bytes=args.bytes,
        replace=args.replace,
    )
    if args.json:
        print(json.dumps(_as_json(added)))
    else:
        _print_stored(added)
    return 0


def _get(args: argparse.Namespace) -> int:
    log_to_stderr(args)
    request = DownloadRequest(_model_name(args), _folder(args), args.replace)
    token, fingerprint = split_token(args.token)
    outgoing = _connect_to(args.peer, args.passcode, token, plain=args.plain)

    async def get(stop: asyncio.Event) -> int:
        clock = LoopClock()
        progress = _Progress(clock, shows=sys.stderr.isatty() and not args.json)
        async with asyncio.TaskGroup() as tasks:
            download = tasks.create_task(
                _download(outgoing, fingerprint, clock, request, progress)
            )
            canceller = tasks.create_task(_cancel_on_stop(stop, download))
            download.add_done_callback(lambda _: canceller.cancel())
        if download.cancelled():
            return EXIT_STOPPED
        kept = stored_model(download.result().path, request.model)
        _report(kept, progress.seconds, as_json=args.json)
        return 0

    return run_loop(get)


async def _cancel_on_stop(
    stop: asyncio.Event, download: asyncio.Task[DownloadedModel]
) -> None:
    await stop.wait()
    download.cancel()


async def _download(
    outgoing: OutgoingConnection,
    fingerprint: bytes | None,
    clock: Clock,
    request: DownloadRequest,
    progress: "_Progress",
) -> DownloadedModel:
    try:
        async with dialer.dial(
            outgoing.url,
            outgoing.headers,
            outgoing.message_max,
            fingerprint=fingerprint or outgoing.fingerprint,
        ) as (link, _):
            session = outgoing.new_session(clock.now())
            return await download_model(session, link, clock, request, progress.update)
    except LinkClosed as closed:
        raise Unavailable(str(closed)) from closed
    finally:
        progress.end()


def _connect_to(
    peer: str, passcode: str, token: str, *, plain: bool
) -> OutgoingConnection:
    """Return how to connect to a peer, by the wire that carries models.

    Raises ConfigError if the address is invalid.
    """
    url = peer if "://" in peer else f"tcp://{peer}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in SCHEMES and bool(parts.hostname and parts.port)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"--from {peer}: expected HOST:PORT; a coordinator reports its port "
            "under `direct` at /healthz"
        )
    connectors = [
        each for each in map(_peering, discover().values()) if each is not None
    ]
    assert connectors, "one wire carries models"
    # A key of its own: with the worker's key it would replace the worker.
    signer = Signer.from_seed(secrets.token_bytes(32))
    profile = WorkerProfile(
        "shoal-models",
        ServedModel(""),
        0,
        token,
        identity=signer,
        random_bytes=secrets.token_bytes,
        passcode=passcode,
        plain=plain,
    )
    return connectors[0](url, profile)


def _peering(
    protocol: AnyWireProtocol,
) -> Callable[[str, WorkerProfile], OutgoingConnection] | None:
    return protocol.peering


def _folder(args: argparse.Namespace) -> Path:
    data = Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA)
    folder: Path = args.folder or data / MODELS
    return folder.expanduser()


class _Progress:
    """A progress line on the terminal."""

    def __init__(self, clock: Clock, *, shows: bool) -> None:
        self._clock = clock
        self._shows = shows
        self.seconds = 0.0  # duration of the download
        self._began = self._drawn = clock.now()

    def update(self, received: int, size: int | None) -> None:
        now = self._clock.now()
        if not self._shows or now - self._drawn < REDRAW_EVERY:
            return
        self._drawn = now
        share = f" of {_bytes(size)}, {received * 100 // size} %" if size else ""
        speed = _bytes(int(received / (now - self._began)))
        # Padded, to overwrite a longer line.
        line = f"{_bytes(received)}{share}, {speed}/s"
        print(f"\r{line:60}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Record the duration, and clear the line."""
        self.seconds = self._clock.now() - self._began
        if self._shows and self._drawn != self._began:
            print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)


def _report(kept: StoredModel, seconds: float, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(kept) | {"seconds": round(seconds, 3)}))
    else:
        _print_stored(kept)


def _print_stored(kept: StoredModel) -> None:
    files = "1 file" if kept.files == 1 else f"{kept.files} files"
    print(printable(f"{kept.path} ({files}, {_bytes(kept.size)})"))
    if kept.gguf is not None:
        print(printable(f"to offer it: shoal join --model {kept.name}={kept.gguf}"))


def _as_json(kept: StoredModel) -> dict[str, object]:
    return {
        "name": kept.name,
        "path": str(kept.path),
        "size": kept.size,
        "files": kept.files,
        "gguf": None if kept.gguf is None else str(kept.gguf),
    }


def _bytes(size: int) -> str:
    """Format a number of bytes, in powers of 1000."""
    number = float(size)
    for unit in UNITS[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {UNITS[-1]}"
