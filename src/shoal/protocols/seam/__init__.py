"""The seam between worker protocols and the rest: what every wire has."""
