"""The dashboard: its files, the sessions of browsers, and the data that it shows."""
