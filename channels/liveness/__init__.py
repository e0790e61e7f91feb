"""Liveness: watching ranks, and making a communicator fail when one of its ranks is lost."""
