"""Finds the file of a model that people name, and pulls it from the hub if need be."""

import asyncio
import sys
from pathlib import Path

import click

from shoal.cli.use.models.pull import choose, describe, largest_model, pull, short_name
from shoal.domain.errors import ConfigError
from shoal.engines import gguf_files, local_servers
from shoal.models.model_hub import HubName, ModelHub, parse_hub_name
from shoal.models.names import HubFile, choose_model, gguf_models


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
