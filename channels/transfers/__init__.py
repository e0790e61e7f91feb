"""Agents, which come and go, and transfers between their memory. Agents do not form a group."""
