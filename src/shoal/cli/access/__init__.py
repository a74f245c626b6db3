"""Commands about who may do what, and what it cost."""
