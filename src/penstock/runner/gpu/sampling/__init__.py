"""Sampling by the kernels of a GPU: every feature of `penstock.runner.sampling`, and drafts drawn and verified, without
waiting for the device before the step's result is asked for."""
