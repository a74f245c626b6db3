"""Real ``shoal`` processes for the documents' peers."""

from live.conftest import programs, pytest_itemcollected

__all__ = ["programs", "pytest_itemcollected"]
