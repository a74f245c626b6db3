"""What runs a model on a worker."""
