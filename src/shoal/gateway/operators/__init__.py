"""Views and orders of operators: workers, the live state of the pool, events."""
