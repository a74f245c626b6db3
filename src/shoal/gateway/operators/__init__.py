"""What operators see and order: workers, the live state of the pool, events."""
