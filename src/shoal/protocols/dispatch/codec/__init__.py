"""Stateless encoding and decoding of Dispatch messages."""
