"""Generations of a group: what their ranks and the rendezvous tell each other."""
