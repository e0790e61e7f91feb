"""Joining ranks: bootstrap, topology, memory that peers reach, channels, the communicator and everything built on
it."""
