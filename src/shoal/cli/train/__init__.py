"""Run a script on several machines at once, as torchrun does on one.

Options may stand before or after the script; whatever else follows the script, and all
that follows `--`, are the script's arguments.
"""

import argparse
import json
from pathlib import Path

from shoal.cli import api
from shoal.cli.train.run_display import DONE, FAILED, SUBMITTED, RunDisplay, display
from shoal.client.training_run import (
    BACKENDS,
    QUEUE_SECONDS,
    RunFailed,
    TrainingRun,
    launch,
)
from shoal.domain.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # `--epoch` is the script's, and not --env
    _add_options(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="Python file to run, and its arguments",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="number of machines (default: %(default)s)",
    )
    parser.add_argument(
        "--min-nodes",
        type=int,
        metavar="M",
        help="number of machines below which the run ends (default: all)",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=1,
        metavar="K",
        help="processes on each machine (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="backend of torch.distributed that the script finds in "
        "$SHOAL_RUN_BACKEND (default: %(default)s)",
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=0,
        metavar="N",
        help="slots of each worker that the script takes (default: whole machines)",
    )
    parser.add_argument(
        "--with",
        dest="files",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="file or folder to place beside the script; repeatable",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the files that rank 0 leaves in $SHOAL_OUTPUT",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the script; repeatable",
    )
    parser.add_argument("--name", default="", help="name of the run (default: SCRIPT)")
    parser.add_argument(
        "--queue",
        type=float,
        default=QUEUE_SECONDS,
        metavar="SECONDS",
        help="limit of the wait for the machines (default: %(default)g)",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="print the id of the run, and leave it to itself",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per event"
    )
    api.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not args.command:
        raise ConfigError("give the script to run: shoal train --nodes N SCRIPT")
    arguments = script_arguments(args)
    if args.detach and args.output is not None:
        raise ConfigError("--output: the files of a detached run are not fetched")
    run = launch(
        args.command[0],
        arguments,
        nodes=args.nodes,
        min_nodes=args.min_nodes,
        processes=args.nproc_per_node,
        backend=args.backend,
        slots=args.slots,
        files=args.files,
        environment=dict(map(_parse_variable, args.env)),
        name=args.name,
        queue=args.queue,
        url=args.url,
        api_key=args.api_key,
        data_dir=args.data_dir,
        cacert=args.cacert,
    )
    try:
        if args.detach:
            print(
                json.dumps({"run": run.id, "jobs": run.jobs}) if args.json else run.id
            )
            return 0
        with display(args.nodes, args.nproc_per_node, as_json=args.json) as shown:
            return _watch(run, shown, args.output)
    finally:
        run.close()


def script_arguments(args: argparse.Namespace) -> list[str]:
    """Read the options after the script into ``args``; return the script's arguments.

    Options that are not among them keep the values that ``args`` has.
    """
    parser = argparse.ArgumentParser("shoal train", add_help=False, allow_abbrev=False)
    _add_options(parser)
    _, *rest = args.command
    end = rest.index("--") if "--" in rest else len(rest)
    _, unknown = parser.parse_known_args(rest[:end], args)
    return [*unknown, *rest[end + 1 :]]


def _watch(run: TrainingRun, shown: RunDisplay, output: Path | None) -> int:
    """Show a run until its end; Ctrl-C cancels it."""
    try:
        text = f"{run.id}: waiting for {len(run.jobs)} machines"
        shown.show({"event": SUBMITTED, "run": run.id, "text": text})
        for event in run.events():
            if event is not None:
                shown.show(event)
        try:
            if output is not None:
                run.save_output(output)
            results = run.result()
        except RunFailed as error:
            shown.show({"event": FAILED, "run": run.id, "text": str(error)})
            raise
        count = sum(each is not None for each in results)
        text = f"done: {count} of {len(results)} machines"
        shown.show({"event": DONE, "run": run.id, "text": text})
    except KeyboardInterrupt:
        run.cancel()
        raise
    return 0


def _parse_variable(argument: str) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if not name or not equals:
        raise ConfigError(f"--env {argument}: expected NAME=VALUE")
    return name, value
