"""Decisions: who gets which job and what becomes of it.  Pure, and told the time."""
