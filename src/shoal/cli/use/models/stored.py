"""``shoal models ls``, ``show`` and ``rm``: the models here, and those of the pool."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
from msgspec import to_builtins
from rich.filesize import decimal

from shoal.cli.options import json_option, pass_api_with_json, yes_option
from shoal.cli.terminal import Columns, printable, show, show_table, table
from shoal.cli.use.models.deployments import machine_name, with_others
from shoal.client.coordinator import CoordinatorApi
from shoal.config import data_folder
from shoal.domain.errors import NotFound, ShoalError
from shoal.domain.worker import LoadableModel, ModelLibrary
from shoal.engines.gguf_files import hub_cache, model_folders
from shoal.engines.loadable_files import FileLibrary
from shoal.models.library import (
    StoredModel,
    loadable_files,
    remove_model,
    stored_models,
)
from shoal.models.partial_model import remove_partial
from shoal.models.safetensors_files import in_cache
from shoal.pool.roster import suggest_names

F = TypeVar("F", bound=Callable[..., Any])
PoolModel: TypeAlias = dict[str, Any]
"""A model of the pool, as ``GET /v1/models`` describes it."""

MODELS = "models"  # the folder of models, in the data folder
STORED: Columns = {
    "NAME": lambda model: model.name,
    "SIZE": lambda model: decimal(model.size),
    "FILES": lambda model: model.files,
    "WHERE": lambda model: model.path,
}
ELSEWHERE: Columns = {
    "NAME": lambda found: found.model.name,
    "SIZE": lambda found: decimal(found.model.size),
    "WEIGHTS": lambda found: found.model.quantization,
    "CONTEXT": lambda found: found.model.context or "",
    "MEMORY": lambda found: decimal(found.memory),
    "RUNS WITH": lambda found: found.model.engine,
    "WHERE": lambda found: found.path,
}
IN_POOL: Columns = {
    "NAME": lambda model: _with_alias(model),
    "DOES": lambda model: ", ".join(model.get("kinds", ())),
    "CONTEXT": lambda model: model.get("context_window") or "",
    "STATE": lambda model: model.get("state", ""),
    "SLOTS": lambda model: model.get("slots", ""),
    "SIZE": lambda model: decimal(size) if (size := model.get("size")) else "",
    "LOADED ON": lambda model: _loaded_on(model),
    "ON DISK OF": lambda model: _names(model.get("stored", ())),
    "WOULD FIT": lambda model: sum(each["fits"] for each in model.get("fits", ())),
}


def _loaded_on(model: PoolModel) -> str:
    """Return the machines that serve a model, or how many workers do."""
    named = [{**each, "node": each["id"]} for each in model.get("places", ())]
    workers = model.get("workers", 0)
    return _names(named) or ("1 worker" if workers == 1 else f"{workers} workers")


def _names(machines: Iterable[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(map(machine_name, machines)))


@dataclass(frozen=True, slots=True)
class ModelElsewhere:
    """A model that another program keeps on this machine."""

    model: LoadableModel
    path: Path

    @property
    def memory(self) -> int:
        """The bytes that it needs with one context, as a worker would give it."""
        context = ModelLibrary().context
        return self.model.memory(min(context, self.model.context or context), 1)


def models_elsewhere(folder: Path) -> list[ModelElsewhere]:
    """Return the models in the folders of other programs, ordered by name."""
    files = FileLibrary(partial(loadable_files, folder, model_folders(data_folder())))
    files.scan()
    found = [
        ModelElsewhere(each.model, each.path)
        for each in files.files.values()
        if not each.path.is_relative_to(folder)
    ]
    found += [ModelElsewhere(model, path) for path, model in in_cache(hub_cache())]
    return sorted(found, key=lambda each: each.model.name)


def _with_alias(model: PoolModel) -> str:
    """Return a model's name; of an alias, also the model that it stands for now."""
    served = model.get("alias_of")
    return f"{model['id']} (alias of {served})" if served else str(model["id"])


def folder_option(name: str) -> Callable[[F], F]:
    """Return a decorator that adds the option for the folder of models."""
    return click.option(
        name,
        "folder",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Folder of models.  Default: models in the data folder.",
    )


def models_folder(given: Path | None) -> Path:
    """Return the folder that was given, or else the one in the data folder."""
    return (given or data_folder() / MODELS).expanduser()


def stored_lines(stored: StoredModel) -> Iterator[str]:
    """Yield where a model is, and the command that offers it."""
    files = "1 file" if stored.files == 1 else f"{stored.files} files"
    yield printable(f"{stored.path} ({files}, {decimal(stored.size)})")
    if stored.gguf is not None:
        offer = f"shoal join --model {stored.name}={stored.gguf}"
        yield printable(f"to offer it: {offer}")


def stored_json(stored: StoredModel) -> dict[str, Any]:
    """Return the form of a model for ``--json``."""
    found: dict[str, Any] = to_builtins(stored, enc_hook=str)
    return found


def _elsewhere_json(found: ModelElsewhere) -> dict[str, Any]:
    about: dict[str, Any] = to_builtins(found.model)
    return about | {"path": str(found.path), "memory": found.memory}


@click.command("ls")
@folder_option("--in")
@pass_api_with_json
def list_(api: CoordinatorApi, folder: Path | None, as_json: bool) -> None:
    """List the models in the folder, of other programs here, and of the pool."""
    elsewhere = [] if folder is not None else models_elsewhere(models_folder(None))
    folder = models_folder(folder)
    stored = stored_models(folder)
    nothing = (
        f"no models in {printable(str(folder))}: shoal models pull NAME, or "
        "shoal models get NAME --from PEER"
    )
    pool = _pool_models(api)
    listed = {
        "data": [stored_json(each) for each in stored],
        "elsewhere": [_elsewhere_json(each) for each in elsewhere],
        "pool": pool,
    }
    show_table(listed, as_json, STORED, stored, nothing)
    if elsewhere and not as_json:
        click.echo("\nof other programs on this machine:")
        for line in table(ELSEWHERE, elsewhere):
            click.echo(line)
    if as_json or pool is None:
        return
    at = printable(api.base_url)
    click.echo(f"\nin the pool at {at}:" if pool else f"\nno models at {at}")
    for line in table(IN_POOL, pool) if pool else ():
        click.echo(line)


@click.command("show")
@click.argument("name")
@folder_option("--in")
@pass_api_with_json
def show_(api: CoordinatorApi, name: str, folder: Path | None, as_json: bool) -> None:
    """Show a model: where it is stored here, and what it does in the pool."""
    here = stored_models(models_folder(folder))
    pool = _pool_models(api) or []
    stored = _named(here, name)
    offered = next((each for each in pool if each["id"] == name), None)
    if stored is None and offered is None:
        raise _unknown(name, {each.name for each in here} | {p["id"] for p in pool})
    shown = {
        "name": name,
        "stored": None if stored is None else stored_json(stored),
        "pool": offered,
    }
    lines = [] if stored is None else [*stored_lines(stored)]
    if offered is not None:
        lines.append(f"in the pool at {printable(api.base_url)}:")
        lines += table(IN_POOL, [offered])
        if features := ", ".join(offered.get("features", ())):
            lines.append(printable(f"requests may ask for: {features}"))
        lines += map(printable, _places(offered))
    show(shown, as_json, *lines)


@click.command("rm")
@click.argument("name")
@folder_option("--in")
@yes_option
@json_option
def remove(name: str, folder: Path | None, yes: bool, as_json: bool) -> int:
    """Delete a model from the folder, or an incomplete copy; others stay."""
    folder = models_folder(folder)
    here = stored_models(folder)
    stored = _named(here, name)
    if remove_partial(folder, name) and stored is None:
        gone = f"deleted what had been copied of {name}"
        show({"name": name}, as_json, printable(gone))
        return 0
    if stored is None:
        raise _unknown(name, {each.name for each in here})
    if not yes and sys.stdin.isatty():
        what = printable(f"{stored.path} ({decimal(stored.size)})")
        if not click.confirm(f"Delete {what}?", err=True):
            return 1
    remove_model(folder, stored)
    freed = f"deleted {stored.path}: {decimal(stored.size)}"
    show(stored_json(stored), as_json, printable(freed))
    return 0


def _places(model: PoolModel) -> Iterator[str]:
    """Yield where a model of the pool is loaded, could be loaded, and would fit."""
    for each in model.get("replicas", ()):
        yield f"{each['state']} on {machine_name(each)}{with_others(each)}"
    for each in model.get("stored", ()):
        needs = f", needs {decimal(each['memory'])}" if each["memory"] else ""
        size = decimal(each["size"]) if each["size"] else "size unknown"
        about = f"({size}{needs}, {each['engine']})"
        yield f"on the disk of {machine_name(each)} {about}"
    for each in model.get("fits", ()):
        if each["fits"]:
            yield f"would fit on {each['node']}: {each['why']}"


def _pool_models(api: CoordinatorApi) -> list[PoolModel] | None:
    """Return the models of the pool; None if it does not answer.

    With where each is, as far as the key may see machines.  The error is printed if the
    pool's URL was given: otherwise no pool may be meant.
    """
    try:
        found: list[PoolModel] = api.at_once.request("/v1/models")["data"]
        with suppress(ShoalError):
            placed = api.at_once.request("/admin/models")["data"]
            places = {each["id"]: each for each in placed}
            found = [_with_places(each, places.get(each["id"])) for each in found]
    except ShoalError as error:
        if api.url:
            click.echo(printable(f"the pool's models are unknown: {error}"), err=True)
        return None
    return found


def _with_places(model: PoolModel, placed: PoolModel | None) -> PoolModel:
    """Add what ``GET /admin/models`` says of a model; its workers as ``places``."""
    if placed is None:
        return model
    return {**placed, **model, "places": placed["workers"]}


def _named(models: list[StoredModel], name: str) -> StoredModel | None:
    """Return the model of a name, also of one that a folder cannot have."""
    by_name = {each.name: each for each in models}
    return by_name.get(name) or by_name.get(name.replace(":", "-"))


def _unknown(name: str, known: set[str]) -> NotFound:
    hint = suggest_names(name, known, "`shoal models ls` lists all")
    return NotFound(f"no model {name!a}; {hint or '`shoal models ls` lists all'}")
