"""Spans, and their export to a collector of OpenTelemetry."""
