"""``shoal.train``: trains a model on all ranks of a group."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from shoal.config import data_folder
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ShoalError
from shoal.domain.worker import THROTTLE_MAX, machine_load
from shoal.processes.thermal import ThermalReading, read_thermal_level
from shoal.tasks.running_call import progress
from shoal.training.checkpoints.group_checkpoints import GroupCheckpoints
from shoal.training.compression.error_feedback import FeedbackCompression
from shoal.training.elastic_group import ElasticGroup
from shoal.training.group import RankGroup
from shoal.training.group_values import Collectives
from shoal.training.launch.script import RUN_URL
from shoal.training.launch.script_lines import report as report_values
from shoal.training.launch.script_lines import report_hash
from shoal.training.loop.gradient_buckets import GradientBuckets
from shoal.training.loop.plan import (
    Dataset,
    Samples,
    Trained,
    TrainingPlan,
    TrainingReport,
    TrainingResult,
)
from shoal.training.loop.training_loop import TrainingLoop
from shoal.training.meeting import join_run, open_port
from shoal.training.rank_port import GroupMembership

READ_INTERVAL = 10.0  # seconds between readings of the sensors


TIMEOUT = 60.0  # seconds of one operation


@contextmanager
def group_of_environment() -> Iterator[RankGroup | ElasticGroup]:
    """Yield the group that the environment names; without a name, one rank alone.

    Under ``shoal train`` it goes on without ranks that are lost, and admits new ones;
    under torchrun it ends with its first failure.
    """
    if RUN_URL in os.environ:
        with closing(join_run(TIMEOUT, admits=True)) as elastic:
            yield elastic
        return
    if "RANK" not in os.environ:
        with closing(_alone()) as group:
            yield group
        return
    from torch import distributed as dist

    from shoal.training.meeting import meet

    with ExitStack() as stack:
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore("shoal.train", store)
        group = meet(store, rank, size, timedelta(seconds=TIMEOUT))
        yield stack.enter_context(closing(group))


def _alone() -> RankGroup:
    port = open_port("127.0.0.1", encrypts=False)
    links = port.open_group(GroupMembership("alone", 0, 0, 1, ""), TIMEOUT)
    return RankGroup(links, TIMEOUT, on_close=port.close)


class LentShare:
    """Reads the sensors now and then, in a thread, and the owner's file when asked.

    Args:
        data: the data folder, where ``shoal throttle`` writes.
        read: reads the sensors; it may block for seconds.
    """

    def __init__(
        self, data: Path, read: Callable[[], ThermalReading] = read_thermal_level
    ) -> None:
        self._throttle = ThrottleFile(data)
        self._read = read
        self._thermal = read()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def value(self) -> float:
        """From 0, if the machine is too hot or paused by its owner, to 1."""
        percent = self._throttle.read()
        throttle = THROTTLE_MAX if percent is None else percent
        load = machine_load(self._thermal.level, throttle)
        return 0.0 if load.unfit else load.speed

    def close(self) -> None:
        """End the thread, without waiting for a sensor."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(READ_INTERVAL):
            self._thermal = self._read()


def train(
    model: Any,
    dataset: Dataset,
    *,
    loss: Callable[[Any, Any], Tensor],
    optimizer: Any,
    batch: int,
    epochs: int = 1,
    steps: int | None = None,
    scheduler: Any = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    micro_batch: int | None = None,
    equal_shares: bool = False,
    clip: float | None = None,
    compression: FeedbackCompression | None = None,
    seed: int = 0,
    checkpoints: str | Path | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    compare_every: int = 100,
    on_step: Callable[[TrainingReport], object] | None = None,
    group: Collectives | None = None,
) -> TrainingResult:
    """Train a model on all ranks of a group, which call this with the same arguments.

    It continues from the last checkpoint, if there is one.  Afterwards, the model has
    the trained parameters on all ranks.

    Args:
        model: a ``torch.nn.Module``; ranks begin with the parameters of rank 0.
        dataset: the samples, by index; the same on all ranks.
        loss: takes the model and a collated batch, and returns the mean loss of its
            samples, with which ``backward`` works.
        optimizer: a ``torch.optim.Optimizer`` of the model's parameters.
        batch: how many samples a step has, of all ranks together.
        epochs: how often each sample is used; each once in an epoch, even if ranks join
            or leave.
        steps: how many steps the run has; None: what the epochs have.
        scheduler: called with ``step()`` after each step that counted.
        collate: makes a batch of samples.
        micro_batch: the most samples of one forward pass; a rank with a larger part of
            the batch makes several.  None: there is no limit.
        equal_shares: all ranks have equal parts of each batch, and not by their speed;
            so a run has the same bits when it is repeated.
        clip: the largest norm of the gradient.
        compression: sends gradients in fewer bytes, such as ``"int8"``, or ``"auto"``
            for what suits the links; what is left out is added to the next gradient.
        seed: of the order of the samples.
        checkpoints: a folder, on each machine or shared; None: none are written.
        checkpoint_every: steps between checkpoints; there is one at the end, too.
        keep: how many checkpoints are kept.
        compare_every: steps after which the ranks compare their parameters.
        on_step: called with the report of each step.
        group: the ranks; None: those of torchrun's or Shoal's environment, or this
            process alone.

    Raises:
        InvalidRequest: the arguments are not those of the other ranks, or the data set
            or the batch is too small; the message has the numbers.
        ReplicasDiffer: the parameters of the ranks are not the same any more.
        GroupEnded: the group cannot go on, or goes on without this rank.
    """
    plan = TrainingPlan(
        batch,
        epochs,
        steps,
        micro_batch,
        equal_shares,
        clip,
        checkpoint_every,
        compare_every,
        seed,
    )
    with ExitStack() as stack:
        if group is None:
            group = stack.enter_context(group_of_environment())
        data = data_folder()
        lent = stack.enter_context(closing(LentShare(data)))
        buckets = stack.enter_context(
            closing(GradientBuckets(model.parameters(), group, compression=compression))
        )
        stack.enter_context(_leaving_after_errors(group))
        loop = TrainingLoop(
            Trained(model, optimizer, scheduler),
            Samples(dataset, collate, loss),
            plan,
            group,
            buckets,
            GroupCheckpoints(Path(checkpoints), group, keep) if checkpoints else None,
            lambda: lent.value,
            report_hash,
        )

        def publish(report: TrainingReport) -> None:
            progress(report.done, str(report))
            report_values(
                step=report.step,
                loss=report.loss,
                samples_per_s=report.speeds[group.place.rank],
                sync=report.sync,
                generation=report.generation,
                sent=report.sent,
            )
            if on_step is not None:
                on_step(report)

        return loop.run(publish)


@contextmanager
def _leaving_after_errors(group: Any) -> Iterator[None]:
    """Leave a group after an error of this rank alone, so that no rank waits for it.

    Errors of Shoal are those that all ranks raise.
    """
    try:
        yield
    except ShoalError:
        raise
    except BaseException as error:
        if isinstance(group, RankGroup):
            group.abort(f"this rank failed: {type(error).__name__}")
        else:
            group.abort()
        raise
