"""Decisions: which worker gets which job, and what becomes of it.  Pure functions of
the pool and the time.
"""
