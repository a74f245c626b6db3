"""Tests of the engines, against the tiny model and real servers."""
