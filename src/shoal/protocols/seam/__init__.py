"""The interface between worker protocols and the rest: what every wire has."""
