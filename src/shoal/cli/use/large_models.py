"""How ``shoal run`` shows a model that several machines of the pool run together."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

import click
from rich.filesize import decimal

from shoal.cli.terminal import console, printable
from shoal.cli.use.models.deployments import PATH as DEPLOYMENTS
from shoal.cli.use.models.deployments import deployment_path, machine_name
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.errors import ConfigError, Forbidden, JobError, NotFound

LOOK_EVERY = 0.2  # seconds
PATIENCE = 3600.0  # seconds for a model to be loaded: it may be copied over a slow line


def split_plan(api: CoordinatorApi, model: str, on: str) -> Mapping[str, Any]:
    """Return how a model would be split over the machines of a pool."""
    query = f"?{urlencode({'on': on})}" if on else ""
    plan: Mapping[str, Any] = api.request(
        f"/admin/splits/{quote(model, safe='')}{query}"
    )
    return plan


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield a plan for people: the sizes of the parts, and how fast it would be."""
    if plan["why"]:
        yield printable(f"{plan['model']} cannot be split: {plan['why']}")
        return
    parts = plan["parts"]
    shown = ", ".join(
        f"{machine_name(each)} ({decimal(each['bytes'])})" for each in parts
    )
    size = decimal(sum(each["bytes"] for each in parts))
    yield printable(f"{plan['model']}: {size}, split over {shown}")
    for each in parts:
        yield printable(f"  {machine_name(each)}: {each['layers']} layers")
    if (speed := plan["tokens_per_second"]) is None:
        yield "  loaded"
    else:
        yield f"  about {speed:.1f} tokens a second, if links are quick"
    if (load := plan.get("load_seconds")) is not None:
        yield f"  up to {load:.0f} s to send the layers, less those that are cached"


@contextmanager
def kept_loaded(api: CoordinatorApi, model: str, on: str) -> Iterator[None]:
    """Have a model loaded within the block, on some machines, and show how far it is.

    Raises JobError if it cannot be loaded, and ConfigError if an operator keeps it
    loaded elsewhere.
    """
    if _deployment(api, model) is not None:
        if on:
            raise ConfigError(
                f"--on: {model} is deployed already; `shoal models deploy {model} --on "
                f"{on}` changes where"
            )
        yield
        return
    path = deployment_path(model)
    names = [each.strip() for each in on.split(",") if each.strip()]
    api.request(path, {"replicas": 1, "on": names}, method="PUT")
    try:
        _await_loaded(api, model)
        yield
    finally:
        api.request(path, method="DELETE")


def _await_loaded(api: CoordinatorApi, model: str) -> None:
    """Show each part of a model that is being loaded, until it is."""
    shown: set[str] = set()
    deadline = time.monotonic() + PATIENCE
    with console(stderr=True).status(printable(f"loading {model} …")) as status:
        while time.monotonic() < deadline:
            if (deployed := _deployment(api, model)) is None:
                raise JobError(f"{model} is no longer to be loaded: somebody undid it")
            for replica in deployed["present"]:
                for part in replica["parts"]:
                    line = (
                        f"{machine_name(part)}: {part['layers']} layers, "
                        f"{decimal(part['bytes'])}"
                    )
                    if line not in shown:
                        shown.add(line)
                        click.echo(printable(line), err=True)
                if replica["state"] == "loaded":
                    return
                status.update(printable(f"loading {model}: {replica['step']} …"))
            why = deployed["why"]
            if why and why not in shown and not deployed["present"]:
                shown.add(why)
                click.echo(printable(f"{model}: {why}"), err=True)
            time.sleep(LOOK_EVERY)
    raise JobError(f"{model} was not loaded within {PATIENCE / 60:.0f} minutes")


def needs_split(api: CoordinatorApi, model: str) -> bool:
    """Return whether a model has to be split over machines, if this key may see that.

    One that is loaded has been.
    """
    try:
        listed = api.request("/admin/models")["data"]
        if any(each["id"] == model and each["workers"] for each in listed):
            return False
        return bool(split_plan(api, model, "")["needed"])
    except (Forbidden, NotFound):  # also of an earlier coordinator
        return False


def _deployment(api: CoordinatorApi, model: str) -> Mapping[str, Any] | None:
    found = api.request(DEPLOYMENTS)["data"]
    return next((each for each in found if each["name"] == model), None)
