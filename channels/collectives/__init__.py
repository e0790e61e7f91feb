"""Collectives of a communicator's ranks."""
