"""The dashboard: its files, and the sessions of browsers that use it."""
