"""What can be seen of a running engine: the life of every request, Prometheus metrics, traces."""
