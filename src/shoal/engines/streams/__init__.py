"""Reads the answers that servers stream: from bytes to pieces."""
