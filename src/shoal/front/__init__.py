"""Processes that serve HTTP for one coordinator, whose hub is in another process."""
