"""Arrays from one rank to another, by tag, beside the collectives."""
