"""Sampling by the kernels of a GPU: every feature of `penstock.runner.sampling`, and drafts drawn and judged, without a
word from the device before the step's result is asked for."""
