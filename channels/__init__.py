"""Joins ranks: bootstrap, topology, shared memory, channels, the communicator, and everything that is built on it."""
