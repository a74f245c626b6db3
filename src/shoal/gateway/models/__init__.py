"""Models: for clients, and where each is, fits and is shared."""
