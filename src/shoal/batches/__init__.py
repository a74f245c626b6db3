"""Batches of requests that run while the pool has nothing better to do."""
