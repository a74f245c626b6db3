"""Starts the scripts of a run on the workers, and reports what they do."""

from typing import Final

MEMBER_CALL: Final = "shoal.training.launch.member.run_member"
"""The name of calls that are members of runs."""
