"""The runner's parts for a CPU: torch and the native kernels; every result is complete when a call returns.

Their siblings in `penstock.runner.gpu` have the same interfaces; the worker chooses one or the other.
"""
