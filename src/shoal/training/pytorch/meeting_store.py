"""How ranks meet at PyTorch's store: a group that does not change."""

import json
import secrets
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from shoal.training.group import RankGroup
from shoal.training.meeting import open_port, own_address, reachable_hosts
from shoal.training.rank_port import GroupMembership, RankAddress

SECRET_SIZE = 32  # random bytes


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RankGroup:
    """Exchange addresses over PyTorch's store, and return this rank's group.

    Rank 0 draws the group's name and secret: whoever can use the store is in the group.
    Connections are encrypted unless the ranks meet on loopback; in a run of
    ``shoal train``, all but those within a machine are.
    """
    seconds = timeout.total_seconds()
    host = own_address()
    if rank == 0:
        drawn = {
            "group": secrets.token_hex(8),
            "secret": secrets.token_hex(SECRET_SIZE),
            "encrypts": not ip_address(host).is_loopback,
        }
        store.set("shoal/group", json.dumps(drawn))
    terms = json.loads(store.get("shoal/group"))
    port = open_port(host, encrypts=terms["encrypts"])
    membership = GroupMembership(terms["group"], 0, rank, size, terms["secret"])
    links = port.open_group(membership, seconds)
    store.set(f"shoal/{rank}", json.dumps([[host], port.port, port.id]))
    keys = {other: f"shoal/{other}" for other in range(size)}
    store.wait(list(keys.values()), timeout)
    addresses = {}
    for other, key in keys.items():
        hosts, *rest = json.loads(store.get(key))
        addresses[other] = RankAddress(reachable_hosts(hosts, host), *rest)
    links.set_addresses(addresses)
    return RankGroup(links, seconds, on_close=port.close)
