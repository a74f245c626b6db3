"""Receipts, their Merkle log, and double-entry accounts: proof of work and prices."""
