"""Accounts and who may use them: balances, keys and tokens, sessions, usage."""
