"""`penstock verify`: whether the tokens of a model, on this machine, are the same however the engine comes to them."""
