"""What all tests of tasks need."""

from tasks.callers import gate, importable

__all__ = ["gate", "importable"]
