"""Blocking sockets for bulk bytes: a thread waits for each."""
