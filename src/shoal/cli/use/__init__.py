"""Commands that use a pool: chats, jobs, functions, training runs, models."""
