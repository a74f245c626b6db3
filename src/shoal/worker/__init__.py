"""The worker: connects to coordinators and runs engines and functions for them."""
