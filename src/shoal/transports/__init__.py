"""The only places that hold sockets: links for the runtime, and nothing else."""
