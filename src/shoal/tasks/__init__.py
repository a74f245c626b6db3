"""Python functions as work: registered by name, called with values, in processes."""
