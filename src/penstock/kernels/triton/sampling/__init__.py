"""Sampling on a GPU: what `penstock.runner.sampling` and `penstock.runner.speculation` define, row by row.

Several programs share a row of logits, one per tile of the vocabulary (`tiles.py`), and another program merges their
results in the order of the tiles. Nothing is accumulated by atomics and tiles do not depend on the number of rows, so a
row's token is the same in every batch and in every replay. Parameters come from tables on the device, by state row.
"""
