"""Which models the pool has: their aliases, and where they are loaded."""
