"""Tests of models that several machines run together."""
