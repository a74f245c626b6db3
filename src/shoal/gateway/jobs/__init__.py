"""The job API: submission, payment, results, events, receipts and webhooks."""
