"""Decisions: which worker gets which job, and how it ends.  Pure functions of
the pool and the time.
"""
