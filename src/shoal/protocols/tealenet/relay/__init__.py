"""A relay of our own."""
