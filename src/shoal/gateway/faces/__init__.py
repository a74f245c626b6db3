"""What clients of foreign systems call."""
