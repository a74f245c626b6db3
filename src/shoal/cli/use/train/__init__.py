"""``shoal train``: run a script on several machines, as torchrun does on one."""

import json
import tempfile
from pathlib import Path

import click

from shoal.cli.options import parse_pair, pass_api
from shoal.cli.use.train import run_display
from shoal.client import training_run
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.errors import ConfigError, ShoalError
from shoal.domain.job import GANG_MAX
from shoal.training.run_rounds import machines

FETCH = "fetch"


@click.command(FETCH)
@click.argument("run")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("."),
    show_default="the current folder",
    metavar="DIR",
    help="Folder for the files.",
)
@pass_api
def fetch(api: CoordinatorApi, run: str, output: Path) -> int:
    """Fetch the files that the script of a run has left in $SHOAL_OUTPUT."""
    try:
        for name in training_run.fetch_output(run, output, **api.options):
            click.echo(output / name)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from error
    return 0


# What follows the script is its own, as with torchrun.
@click.command("train", context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@click.option(
    "--nodes",
    type=click.IntRange(1, GANG_MAX),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of machines.",
)
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    metavar="M",
    help="Minimum number of machines; with fewer, the run ends.  Default: all.",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1, training_run.PROCESSES_MAX),
    default=1,
    show_default=True,
    metavar="K",
    help="Processes on each machine.",
)
@click.option(
    "--backend",
    type=click.Choice(training_run.BACKENDS),
    default=training_run.BACKENDS[0],
    show_default=True,
    help="Backend of torch.distributed that the script finds in $SHOAL_RUN_BACKEND.",
)
@click.option(
    "--slots",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Slots to use on each worker.  Default: whole machines.",
)
@click.option(
    "--with",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File or folder to place beside the script; repeatable.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the files that the script leaves in $SHOAL_OUTPUT.",
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable of the script; repeatable.",
)
@click.option(
    "--name", default="", metavar="NAME", help="Name of the run.  Default: SCRIPT."
)
@click.option(
    "--queue",
    type=float,
    default=training_run.QUEUE_SECONDS,
    show_default=f"{training_run.QUEUE_SECONDS:g}",
    metavar="SECONDS",
    help="Longest wait for the machines.",
)
@click.option(
    "--detach", is_flag=True, help="Print the id of the run, and return at once."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per event."
)
@pass_api
def command(
    api: CoordinatorApi,
    script: str,
    arguments: tuple[str, ...],
    nodes: int,
    min_nodes: int | None,
    nproc_per_node: int,
    backend: str,
    slots: int,
    files: tuple[Path, ...],
    output: Path | None,
    variables: tuple[str, ...],
    name: str,
    queue: float,
    detach: bool,
    as_json: bool,
) -> int:
    """Run a script on several machines at once, as torchrun does on one.

    SCRIPT is the Python file to run, followed by its arguments.  `shoal train fetch
    RUN` fetches the files of a run that has ended.
    """
    if script == FETCH and not Path(script).exists():
        status: int = fetch.main(
            [*arguments], f"shoal train {FETCH}", standalone_mode=False
        )
        return status
    if detach and output is not None:
        raise ConfigError(
            "--output: the files of a detached run are not fetched automatically: "
            f"`shoal train {FETCH} RUN` does it"
        )
    if min_nodes is not None and min_nodes > nodes:
        raise ConfigError(f"--min-nodes {min_nodes}: expected at most --nodes, {nodes}")
    if output is not None:
        _try_folder(output)
    run = training_run.launch(
        script,
        arguments,
        nodes=nodes,
        min_nodes=min_nodes,
        processes=nproc_per_node,
        backend=backend,
        slots=slots,
        files=files,
        environment=dict(parse_pair("--env", each) for each in variables),
        name=name,
        queue=queue,
        output=output is not None or detach,
        **api.options,
    )
    try:
        if detach:
            submitted = {"run": run.id, "jobs": run.jobs}
            click.echo(json.dumps(submitted) if as_json else run.id)
            return 0
        with run_display.display(nodes, nproc_per_node, as_json=as_json) as shown:
            return _watch(run, shown, output)
    finally:
        run.close()


def _watch(
    run: training_run.TrainingRun, shown: run_display.RunDisplay, output: Path | None
) -> int:
    """Show a run until its end; Ctrl-C cancels it."""
    try:
        text = f"{run.id}: waiting for {machines(len(run.jobs))}"
        shown.show({"event": run_display.SUBMITTED, "run": run.id, "text": text})
        for event in run.events():
            if event is not None:
                shown.show(event)
        try:
            if output is not None:
                _save(run, output)
            results = run.result()
        except training_run.RunFailed as error:
            shown.show({"event": run_display.FAILED, "run": run.id, "text": str(error)})
            raise
        count = sum(each is not None for each in results)
        text = f"done: {count} of {machines(len(results))}"
        shown.show({"event": run_display.DONE, "run": run.id, "text": text})
    except KeyboardInterrupt:
        _cancel(run, shown)
        raise
    return 0


def _save(run: training_run.TrainingRun, output: Path) -> None:
    try:
        run.save_output(output)
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror}: `shoal train {FETCH} {run.id}` "
            "fetches the files again"
        ) from error


def _cancel(run: training_run.TrainingRun, shown: run_display.RunDisplay) -> None:
    """Cancel a run, and say so; a second Ctrl-C leaves at once."""
    try:
        click.echo(
            "shoal train: cancelling; Ctrl-C again exits without waiting", err=True
        )
        run.cancel()
    except (KeyboardInterrupt, ShoalError) as error:
        run.leave()
        why = str(error) or "its cancellation is not confirmed"
        click.echo(
            f"shoal train: run {run.id} may still be running: {why}; `shoal jobs "
            f"cancel {run.id}` ends it",
            err=True,
        )
    else:
        shown.show({"event": run_display.CANCELLED, "run": run.id, "text": "cancelled"})


def _try_folder(folder: Path) -> None:
    """Create a folder, and a file in it for a moment.  Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}") from error
