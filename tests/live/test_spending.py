"""What ``docs/promises.md`` says of balances: none is spent twice, by however many."""
