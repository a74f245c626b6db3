"""What is said: messages, and what they carry."""
