"""KV connectors, which move KV into and out of an engine: their interface and the parts that implement it."""
