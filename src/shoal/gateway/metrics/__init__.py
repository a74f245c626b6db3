"""The metrics of ``/metrics``: requests, jobs, the pool and the process.

Metric names follow OpenTelemetry's conventions for generative AI and HTTP where these
have one, in Prometheus' spelling.  All labels are bounded: text from a client or a
worker becomes a label only if the pool knows it, and only a limited number at a time.
``docs/observability.md`` describes each metric.
"""
