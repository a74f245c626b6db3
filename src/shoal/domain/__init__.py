"""The nouns of the program: jobs, commands, events, facts and errors.

Standard library only; no I/O, no clock, no randomness.
"""
