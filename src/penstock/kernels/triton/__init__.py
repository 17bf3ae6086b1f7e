"""The kernels of a GPU, in Triton: one file per kernel, beside it the function that launches it.

A launcher takes what the wrapper of its name in `penstock.kernels` takes, allocates what it returns and waits for
nothing. Without a GPU the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors and slowly, which
is how the tests compare it with the torch reference; `tl.dot` of bfloat16 is wrong there, that of other types right.
"""
