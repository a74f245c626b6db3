"""Shoal's membership in a relay: one node, its registration and its sessions."""
