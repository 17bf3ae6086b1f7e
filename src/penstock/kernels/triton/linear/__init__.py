"""Linear layers on a GPU: the fused ones of a small decode step, and one whose bits do not depend on the batch.

    tiles      the sizes that may be tuned, in one table
    decode     the launches of a Llama-like layer's decode step: y = x @ W.T with the operations before and after it
    products   its kernels
    matmul     y = x @ W.T for any number of rows, every row in one order

A decode step has no separate normalisation kernel. The kernel that writes the residual stream x also writes x * gain,
rounded, and the sums of squares of its part of the row (`Stream`); the product that reads it scales its sums by 1 / rms
at the end, because that factor is the same for the whole row. Normalising inside of the product's loop would cost three
times the product.
"""
