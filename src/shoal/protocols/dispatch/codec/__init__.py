"""Dispatch's messages as bytes: encoded and decoded, without state."""
