"""Python function calls: one client's calls, and the streams that carry them."""
