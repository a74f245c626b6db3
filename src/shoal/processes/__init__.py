"""Child processes: what those that run models and those that run functions share."""
