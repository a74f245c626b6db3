"""Who did what, for how much, so that nobody has to take our word for it."""
