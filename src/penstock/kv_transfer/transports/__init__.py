"""Transports, which move bytes between the memory of two engines: one contract, several implementations."""
