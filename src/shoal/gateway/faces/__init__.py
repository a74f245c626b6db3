"""The HTTP APIs of foreign systems."""
