"""Gangs: jobs that are first leased together, each on another machine."""
