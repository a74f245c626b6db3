"""Tests of the decoder of streamed answers."""
