"""Numbers in fewer bytes: their codings, their collectives, and which to take."""
