"""The operators' API: status, jobs, accounts and credentials."""
