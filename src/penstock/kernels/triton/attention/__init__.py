"""Paged attention: `launcher` is what is called, `plan` says how, `tiles` what is computed.

Prefill, chunks and mixed batches go through `prefill`; requests of a few queries each through `decode`, or, from the
raw projection, through `decode_fused`. All of them walk over tiles of keys in one order, by one function.
"""
