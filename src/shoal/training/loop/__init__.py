"""Our own training loop: ``shoal.train``."""
