"""The node agent: dials out and runs engines for coordinators."""
