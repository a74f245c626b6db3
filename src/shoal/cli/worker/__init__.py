"""Parts of `shoal join`: the coordinator to join, and reports on it."""
