"""One chat beneath all dialects: requests, options, messages and answers."""
