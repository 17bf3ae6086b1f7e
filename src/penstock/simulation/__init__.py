"""A deterministic simulation of engines, clients and faults in which every token is checked."""
