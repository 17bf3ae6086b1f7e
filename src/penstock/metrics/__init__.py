"""Observability of a running engine: request records, Prometheus metrics, traces."""
