"""What the program is about: nouns, the two vocabularies, facts and errors.

Standard library only, no I/O, no clock, no randomness.
"""
