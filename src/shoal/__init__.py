"""Shoal turns the machines you have into one AI computer."""

__version__ = "0.1.0"
