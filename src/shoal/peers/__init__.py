"""Connections to peers that submit jobs as well as run them, and to relays of peers."""
