"""The only modules that hold sockets: listeners, connections and HTTP requests."""
