"""A coordinator in a thread of its own."""

from client.coordinator_thread import beside

__all__ = ["beside"]
