"""Training runs: their members and ranks, their progress, and their results."""
