"""How bytes get from one engine's memory into another's: one contract, several transports."""
