"""How a session through a relay is kept from the relay."""
