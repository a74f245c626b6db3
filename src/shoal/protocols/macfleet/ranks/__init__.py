"""Ranks of a training run: their handshakes, and their messages."""
