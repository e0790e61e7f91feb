"""Connects ranks by channels and shared memory, and implements the communicator and everything that is built on it."""
