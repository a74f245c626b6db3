"""Imitations of the original programs of all wires, for tests.

Written from what the real ones were seen to do on the wire, faults included; none of
them shares a line with what it is tried against.
"""
