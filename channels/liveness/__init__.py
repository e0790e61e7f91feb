"""Liveness: watching ranks, and ending a communicator when one is lost."""
