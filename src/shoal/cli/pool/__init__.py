"""Commands that run a pool: its coordinator, its workers, and their state."""
