"""A coordinator beside the test."""

from client.coordinator_thread import beside

__all__ = ["beside"]
