"""``shoal run``: chat with a model in one command; whatever is missing is started."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import click
from rich.filesize import decimal
from rich.status import Status

from shoal.cli.command_loop import ProgramFailed, run_program
from shoal.cli.options import pass_api
from shoal.cli.terminal import console, printable
from shoal.cli.use.chat import Conversation, chat
from shoal.cli.use.chat.answer import chat_models
from shoal.cli.use.models.deployments import PATH as DEPLOYMENTS
from shoal.cli.use.models.deployments import machine_name
from shoal.cli.use.models.pull import resolve_model, served_models
from shoal.client.coordinator import CoordinatorApi, item_path
from shoal.client.errors import ConnectionLost
from shoal.config.secret_files import KEY_FILE
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import ConfigError, Forbidden, JobError, NotFound, Unauthorized
from shoal.engines import gguf_files
from shoal.pool.roster import similar_names

MODELS = "/v1/models"
LISTED_WITHIN = 10.0  # seconds after a worker has joined
LOOK_EVERY = 0.1  # seconds


@click.command("run")
@click.argument("model", required=False)
@click.argument("prompt", nargs=-1)
@click.option("--yes", is_flag=True, help="Download without asking.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option(
    "--on",
    default="",
    metavar="MACHINE[,MACHINE...]",
    help="Load it on one of these machines, or on several if it fits on none.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Only show how it would be split over machines.",
)
@pass_api
def command(
    api: CoordinatorApi,
    model: str | None,
    prompt: tuple[str, ...],
    yes: bool,
    system: str,
    on: str,
    explain: bool,
) -> None:
    """Chat with a model; start whatever is needed.

    MODEL is the name of a model of the pool, of Ollama or another server on this
    machine, a GGUF file, or a model of Hugging Face's hub:
    ORGANIZATION/NAME[:QUANTIZATION].  If no coordinator runs on this machine, this
    command starts one; if no worker has the model, it starts a worker.  Both stop when
    the command ends.  For a pool that stays, use `shoal serve` and `shoal join`.

    A model that fits on no machine is split over those that lend memory (`shoal join
    --lend-memory`).
    """
    if model is None:
        if not gguf_files.has_demo_model():
            raise click.UsageError("name a model: shoal run MODEL")
        model = gguf_files.DEMO_MODEL
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        if not _is_running(api):
            api = _start_coordinator(api, logs, stack)
        if model not in chat_models(api):
            model = _start_worker(api, model, logs, stack, yes=yes)
        if explain:
            click.echo("\n".join(plan_lines(split_plan(api, model, on))))
            return
        if on or needs_split(api, model):
            stack.enter_context(kept_loaded(api, model, on))
        chat(api, Conversation(model, system), prompt)


def _is_running(api: CoordinatorApi) -> bool:
    """Return whether the coordinator answers.

    Raises ShoalError if it refuses, or does not answer at the URL that was given.
    """
    if not (api.url or (api.data_dir.expanduser() / KEY_FILE).exists()):
        return False
    try:
        api.at_once.request(MODELS)
    except (ConnectionLost, Unauthorized):
        # Where that of this data folder was, another one may have begun since.
        if api.url:
            raise
        return False
    return True


def _start_coordinator(
    api: CoordinatorApi, logs: Path, stack: ExitStack
) -> CoordinatorApi:
    """Start a coordinator on this machine until the end of ``stack``."""
    arguments = ["serve", "--data-dir", str(api.data_dir), "--no-discovery"]
    with _status("starting a coordinator …"):
        program = stack.enter_context(run_program("serve", arguments, logs))
    report = program.report
    return CoordinatorApi(report["url"], report["api_key"], api.data_dir)


def _start_worker(
    api: CoordinatorApi, model: str, logs: Path, stack: ExitStack, *, yes: bool
) -> str:
    """Start a worker with a model until the end of ``stack``; return its name.

    Raises NotFound if the coordinator is not of this machine, or a name that it knows
    was perhaps meant.
    """
    before = chat_models(api)
    host = urlsplit(api.base_url).hostname or ""
    if not is_own_host(host):
        known = ", ".join(before) or "none"
        similar = similar_names(model, before)
        raise NotFound(
            f"the pool at {api.base_url} has no model {model!r}; "
            f"{similar or f'its models: {known};'} to add it, run `shoal join` on a "
            "machine that has it"
        )
    try:
        return _join_with(api, model, logs, stack, before, yes=yes)
    except (ConfigError, ProgramFailed) as error:
        known_names = {*before, *served_models(), *_file_names(api.data_dir)}
        similar = similar_names(model, known_names)
        if similar is None or model in known_names:
            raise
        raise NotFound(f"{error}; {similar}") from error


def _join_with(
    api: CoordinatorApi,
    model: str,
    logs: Path,
    stack: ExitStack,
    before: Mapping[str, int],
    *,
    yes: bool,
) -> str:
    """Join with a model until the end of ``stack``; return its name in the pool."""
    chosen = resolve_model(model, api.data_dir, yes=yes)
    arguments = ["join", "--data-dir", str(api.data_dir), "--model", chosen]
    arguments += ["--load", "none"]  # the pool gets this model, and no other
    with _status(f"starting {model} …") as status:
        started = run_program(
            "join",
            arguments,
            logs,
            on_event=lambda event: status.update(_progress(event)),
        )
        stack.enter_context(started)
        return _new_model(api, chosen.partition("=")[0], before)


def _file_names(folder: Path) -> set[str]:
    """Return the names of the models in the GGUF files of this machine."""
    return {
        each.stem for each in gguf_files.find_models(gguf_files.model_folders(folder))
    }


def _new_model(api: CoordinatorApi, name: str, before: Mapping[str, int]) -> str:
    """Return the name of the model that a worker has just brought.

    The coordinator lists it a moment after the worker has joined.
    """
    deadline = time.monotonic() + LISTED_WITHIN
    while time.monotonic() < deadline:
        models = chat_models(api)
        if name in models:
            return name
        if new := [each for each in models if each not in before]:
            return new[0]
        time.sleep(LOOK_EVERY)
    raise NotFound(f"{name} cannot chat; `shoal status` shows what it can do")


def _progress(event: Mapping[str, Any]) -> str:
    """Return what a program that starts is doing."""
    about = event.get("reason") or event.get("model") or ""
    return printable(f"{event['event']} {about} …")


def _status(text: str) -> AbstractContextManager[Status]:
    return console(stderr=True).status(printable(text))


LOADED_EVERY = 0.2  # seconds between looks at whether it is loaded
PATIENCE = 3600.0  # seconds for a model to be loaded: it may be copied over a slow line


def split_plan(api: CoordinatorApi, model: str, on: str) -> Mapping[str, Any]:
    """Return how a model would be split over the machines of a pool."""
    query = f"?{urlencode({'on': on})}" if on else ""
    plan: Mapping[str, Any] = api.request(item_path("/admin/splits", model) + query)
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
    path = item_path(DEPLOYMENTS, model)
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
            time.sleep(LOADED_EVERY)
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
