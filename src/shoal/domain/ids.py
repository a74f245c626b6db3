"""Identifiers of jobs, workers and leases."""

from typing import NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)

LeaseNumber = NewType("LeaseNumber", int)
"""Which attempt at a job this is, from 1: a fencing token (Kleppmann, 2016)."""


def peer_of(worker_id: WorkerId) -> str:
    """Return the name of the peer, with its wire, that a worker is a model of.

    A peer's name has no slash, and a worker is named PEER or PEER/MODEL.  On wires with
    a connection for each model, it is the name of the machine.
    """
    return worker_id.partition("/")[0]
