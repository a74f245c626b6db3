"""The coordinator: one task owns the pool, stores facts and applies their effects."""
