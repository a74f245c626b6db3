"""Identifiers of jobs, workers and leases."""

from typing import NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)

LeaseNumber = NewType("LeaseNumber", int)
"""Which attempt at a job this is, from 1: a fencing token (Kleppmann, 2016)."""
