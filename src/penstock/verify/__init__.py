"""`penstock verify`: checks that a model's tokens on this machine do not depend on how the engine computes them."""
