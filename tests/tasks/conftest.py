"""What all tests of tasks need."""

from tasks.calling import gate, importable

__all__ = ["gate", "importable"]
