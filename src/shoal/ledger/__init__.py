"""Receipts, their Merkle log and double-entry accounts: proof of who did what, and
for how much.
"""
