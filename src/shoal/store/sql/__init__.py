"""The store in SQL: one set of queries for all databases."""
