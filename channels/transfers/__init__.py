"""Agents, which come and go, and transfers between their memory. They need no group."""
