"""``shoal models pull``, and the models that people name for ``shoal join``."""

import asyncio
import json
import sys
from pathlib import Path

import click
from rich.filesize import decimal

from shoal.cli.options import json_option
from shoal.cli.terminal import console, printable, transfer_progress
from shoal.domain.errors import ConfigError
from shoal.domain.worker import MEMORY_FACTOR
from shoal.engines import gguf_files, local_servers
from shoal.engines.resources import free_memory
from shoal.models.model_hub import HubName, ModelHub, parse_hub_name
from shoal.models.names import GgufModel, HubFile, choose_model, gguf_models


@click.command("pull")
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Download a model from the hub of Hugging Face, or the mirror in HF_ENDPOINT.

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
    path = pull(hub, wanted, model, shown=not as_json)
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


def pull(hub: ModelHub, name: HubName, model: GgufModel, *, shown: bool) -> Path:
    """Download a model, with its progress on a terminal; return the file to load.

    Raises ConfigError, Unavailable.
    """
    with transfer_progress("", model.size, hidden=not shown) as update:
        return hub.download(name.repository, model, lambda size: update(advance=size))


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
    return pull(hub, name, model, shown=True)
