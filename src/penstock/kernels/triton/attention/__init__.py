"""Paged attention: `launcher` has the entry points, `plan` chooses kernels and tiles, `tiles` has the arithmetic.

Prefill, chunks and mixed batches use `prefill`; requests of a few queries each use `decode` or, from the raw
projection, `decode_fused`. All of them process tiles of keys in one order, with one function.
"""
