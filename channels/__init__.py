"""What joins ranks: bootstrap, topology, memory that peers reach, channels, the communicator and what builds on it."""
