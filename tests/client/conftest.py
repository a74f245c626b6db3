"""A coordinator beside the test."""

from client.beside import beside

__all__ = ["beside"]
