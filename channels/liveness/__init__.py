"""Liveness: watching ranks, and ending a communicator when one of its ranks is lost."""
