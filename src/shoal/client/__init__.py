"""Python's own way to use a pool: functions called on its workers."""
