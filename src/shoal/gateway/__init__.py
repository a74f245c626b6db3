"""HTTP: the API that clients, operators, browsers and monitoring use."""
