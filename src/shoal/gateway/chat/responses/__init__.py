"""OpenAI's Responses API: answers that are stored, continued and resumed."""
