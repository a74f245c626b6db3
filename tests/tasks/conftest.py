"""Fixtures of all tests of tasks."""

from tasks.callers import gate, importable

__all__ = ["gate", "importable"]
