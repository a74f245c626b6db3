"""OpenAI's API: chats, completions, embeddings, rankings and transcriptions."""
