"""The group of this process, by the environment in which it was started."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta

from shoal.training.elastic_group import ElasticGroup
from shoal.training.group import RankGroup
from shoal.training.meeting import RUN_URL, join_run, open_port
from shoal.training.rank_port import GroupMembership

TIMEOUT = 60.0  # seconds of one operation


@contextmanager
def group_of_environment(
    timeout: float = TIMEOUT,
) -> Iterator[RankGroup | ElasticGroup]:
    """Yield the group that the environment names; without a name, one rank alone.

    Under ``shoal train`` it goes on without ranks that are lost, and admits new ones;
    under torchrun it ends with its first failure.
    """
    if RUN_URL in os.environ:
        with closing(join_run(timeout, admits=True)) as elastic:
            yield elastic
        return
    if "RANK" not in os.environ:
        with closing(_alone(timeout)) as group:
            yield group
        return
    from torch import distributed as dist

    from shoal.training.pytorch.meeting_store import meet

    with ExitStack() as stack:
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore("shoal.train", store)
        group = meet(store, rank, size, timedelta(seconds=timeout))
        yield stack.enter_context(closing(group))


def _alone(timeout: float) -> RankGroup:
    port = open_port("127.0.0.1", encrypts=False)
    links = port.open_group(GroupMembership("alone", 0, 0, 1, ""), timeout)
    return RankGroup(links, timeout, on_close=port.close)
