"""Anthropic's Messages API: a translation of the chat form, in both directions."""
