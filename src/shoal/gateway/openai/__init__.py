"""OpenAI's API: chats, completions, embeddings and models."""
