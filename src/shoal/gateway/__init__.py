"""HTTP: what clients, operators and browsers talk to."""
