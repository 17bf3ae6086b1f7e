"""Sampling by GPU kernels: every feature of `penstock.runner.sampling`, and drawing and verifying drafts, without
waiting for the device before the step's result is requested.
"""
