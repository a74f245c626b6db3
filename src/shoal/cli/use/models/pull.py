"""``shoal models pull``, and the models that people name for ``shoal join``."""

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.filesize import decimal

from shoal.app.model_port import port_towards
from shoal.cli.options import json_option
from shoal.cli.terminal import console, printable, transfer_progress
from shoal.cli.worker.join_target import resolve_target, split_token
from shoal.config import data_folder
from shoal.config.secret_files import TOKEN_FILE
from shoal.domain.errors import ConfigError, ShoalError
from shoal.domain.worker import MEMORY_FACTOR
from shoal.engines import gguf_files, local_servers
from shoal.engines.resources import free_memory
from shoal.models.hub_copies import HubSource, fetch_with_pool
from shoal.models.model_hub import HubName, ModelHub, parse_hub_name
from shoal.models.names import GgufModel, HubFile, base_name, choose_model, gguf_models
from shoal.models.peer_connection import DialledPeer
from shoal.worker.identity import IDENTITIES, known_coordinators, load_identity

STAGED = ".shoal"  # folder in the hub's cache for what is copied from the pool


@click.command("pull")
@click.argument("name")
@click.option(
    "--from",
    "where",
    multiple=True,
    metavar="URL",
    help="URL of a coordinator to ask first, as for `shoal join`; repeatable.  "
    "Default: that of this machine, and those that have admitted it as a worker.",
)
@click.option(
    "--token",
    default="",
    envvar="SHOAL_TOKEN",
    show_envvar=True,
    metavar="TOKEN",
    help="Join token of the coordinators in --from.",
)
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Ask machines of the pool first, and the hub only if none has the model.",
)
@json_option
def command(
    name: str, where: tuple[str, ...], token: str, peers: bool, as_json: bool
) -> None:
    """Download a model from the hub of Hugging Face, or the mirror in HF_ENDPOINT.

    Machines of the pool that have the very same files are asked first.

    NAME is ORGANIZATION/NAME[:QUANTIZATION], such as unsloth/Qwen3-8B-GGUF:Q4_K_M.
    Without a quantization, it takes four bits, or fewer if those do not fit into the
    memory of this machine.  The file goes to the hub's cache, where other programs and
    `shoal join` find it.  HF_TOKEN gives access to private and gated models.
    """
    hub = ModelHub()
    wanted = resolve_name(hub, name)
    model = choose(hub, wanted)
    notes = console(stderr=True)
    if not as_json:
        notes.print(printable(describe(wanted, model)), markup=False)
    sources = asyncio.run(known_pools(where, token)) if peers else []
    path = pull(hub, wanted, model, shown=not as_json, peers=sources)
    if as_json:
        about = {
            "name": wanted.repository,
            "quantization": model.quantization,
            "path": str(path),
            "size": model.size,
        }
        click.echo(json.dumps(about))
        return
    click.echo(printable(str(path)))
    name = short_name(wanted.repository)
    notes.print(
        printable(f"to offer it: shoal join --model {name}={path}"), markup=False
    )


def short_name(repository: str) -> str:
    """Return what a repository's model, or a file's, is called in the pool."""
    name = repository.rpartition("/")[2]
    for suffix in ("-GGUF", "-gguf", ".gguf"):
        name = name.removesuffix(suffix)
    return name.lower()


def resolve_name(hub: ModelHub, name: str) -> HubName:
    """Return what a name means; raises ConfigError with suggestions for a short one."""
    found = parse_hub_name(name)
    if found is None:
        raise ConfigError(
            f"{name}: expected ORGANIZATION/NAME[:QUANTIZATION]; {hub.suggest(name)}"
        )
    return found


def choose(hub: ModelHub, name: HubName) -> GgufModel:
    """Return the model of a repository that fits this machine.

    Raises ConfigError, Unavailable.
    """
    models = hub.models(name.repository)
    return choose_model(models, largest_model(), name.quantization)


def largest_model() -> int | None:
    """Return the bytes of the largest model that can run now; None: unknown."""
    free = free_memory()
    return None if free is None else int(free / MEMORY_FACTOR)


def describe(name: HubName, model: GgufModel) -> str:
    """Return what will be downloaded, in one line."""
    chosen = model.quantization or model.files[0].name
    return f"{name.repository}, {chosen}, {decimal(model.size)}"


async def known_pools(where: Sequence[str] = (), token: str = "") -> list[DialledPeer]:
    """Return the coordinators of the URLs; without any, those that admit this machine.

    These are its own, if that runs, and those that it has joined.
    """
    token, fingerprint = split_token(token)
    if where:
        return [DialledPeer(each, token, fingerprint=fingerprint) for each in where]
    data, found = data_folder(), list[DialledPeer]()
    if (data / TOKEN_FILE).exists():
        own = await resolve_target("", "auto", "", data)
        if not own.unreachable:
            peer = DialledPeer(own.http_url, own.token, fingerprint=own.fingerprint)
            found.append(peer)
    keys = sorted((data / IDENTITIES).glob("*.json"))
    for url, known in known_coordinators(data).items() if keys else ():
        certificate = bytes.fromhex(known.fingerprint) or None
        signer = load_identity(keys[0])
        found.append(DialledPeer(url, fingerprint=certificate, signer=signer))
    return found


def pull(
    hub: ModelHub,
    name: HubName,
    model: GgufModel,
    *,
    shown: bool,
    peers: Sequence[DialledPeer] = (),
) -> Path:
    """Download a model, with its progress on a terminal; return the file to load.

    It comes from the ``peers``, if they have it.  Raises ConfigError, Unavailable.
    """
    if peers and not hub.has(name.repository, model):
        hub.check_space(model)
        try:
            _copy_from_pool(hub, name, model, peers, shown=shown)
        except ShoalError as error:
            notes = console(stderr=True)
            notes.print(printable(f"from the hub, since {error}"), markup=False)
    with transfer_progress("", model.size, hidden=not shown) as update:
        return hub.download(name.repository, model, lambda size: update(advance=size))


def _copy_from_pool(
    hub: ModelHub,
    name: HubName,
    model: GgufModel,
    peers: Sequence[DialledPeer],
    *,
    shown: bool,
) -> None:
    """Get a model's files into the hub's cache, with the machines of the pool.

    Raises ShoalError.
    """
    if not all(each.sha256 for each in model.files):
        return
    first = base_name(model.files[0].name).removesuffix(".gguf")
    names = dict.fromkeys((first, short_name(name.repository)))
    staged = hub.cache / STAGED
    with transfer_progress("from the pool", model.size, hidden=not shown) as update:

        def on_progress(held: int, size: int | None) -> None:
            update(completed=held, total=size)

        source = HubSource(hub, name.repository, model)
        fetching = fetch_with_pool(
            *(source, names, peers, staged, on_progress),
            open_port=port_towards(peers[0].url),
        )
        files = asyncio.run(fetching) or {}
    for sha256, path in files.items():
        hub.keep(name.repository, sha256, path)
    shutil.rmtree(staged, ignore_errors=True)


def resolve_model(name: str, folder: Path, *, yes: bool) -> str:
    """Return the argument of ``shoal join --model`` for a model.

    ``name`` is a GGUF file, a model of the hub, or the name of a model that an engine
    or a folder of this machine has.  ``folder`` is the data folder.  A model of the hub
    that is not here is pulled, after a question unless ``yes``.

    Raises ConfigError, Unavailable.
    """
    file = Path(name).expanduser()
    if name.lower().endswith(".gguf") and file.is_file():
        return f"{short_name(file.name)}={file.absolute()}"
    wanted = parse_hub_name(name)
    if wanted is None or "=" in name or name in served_models():
        return name
    path = find_pulled(wanted, folder) or _pull(wanted, yes=yes)
    return f"{short_name(wanted.repository)}={path}"


def served_models() -> set[str]:
    """Return the names of the models that servers on this machine have."""
    found = asyncio.run(local_servers.served_models(local_servers.server_locations()))
    return {name for names in found.values() for name in names}


def find_pulled(name: HubName, folder: Path) -> Path | None:
    """Return the file of a model that was pulled before; None if there is none.

    Of several quantizations it is the one that would be pulled, or the smallest if none
    fits.
    """
    place = f"models--{name.repository.replace('/', '--')}"
    files = {
        part.name: part
        for path in gguf_files.find_models(gguf_files.model_folders(folder))
        if place in path.parts
        for part in gguf_files.parts_of(path)
        if part.is_file()
    }
    models = gguf_models(
        HubFile(file, path.stat().st_size) for file, path in files.items()
    )
    if not models:
        return None
    try:
        model = choose_model(models, largest_model(), name.quantization)
    except ConfigError:
        if name.quantization:
            return None
        model = models[0]
    return files[model.files[0].name]


def _pull(name: HubName, *, yes: bool) -> Path:
    hub = ModelHub()
    model = choose(hub, name)
    question = f"Download {describe(name, model)} from {hub.endpoint}?"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{name.repository} is not on this machine; to download it: --yes, or "
                f"shoal models pull {name.repository}"
            )
        click.confirm(question, default=True, abort=True, err=True)
    return pull(hub, name, model, shown=True, peers=asyncio.run(known_pools()))
