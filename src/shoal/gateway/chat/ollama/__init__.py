"""Ollama's API: its chats, completions, embeddings and lists of models."""
