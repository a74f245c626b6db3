"""The only places that hold sockets: what is listened on, dialled and asked."""
