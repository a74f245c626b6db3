"""Generations of a group: the messages between their ranks and the rendezvous."""
