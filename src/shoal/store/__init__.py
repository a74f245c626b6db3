"""The database: one port, and the SQLite store that implements it."""
