"""Pipes between a child process and its parent, and readings of this machine."""
