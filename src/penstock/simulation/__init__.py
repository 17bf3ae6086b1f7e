"""A deterministic world of engines, clients and faults, in which every token can be checked."""
