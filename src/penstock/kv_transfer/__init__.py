"""How KV leaves an engine and enters it: one small interface, and the parts that implement it."""
