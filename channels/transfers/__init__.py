"""Agents, which form no group, and transfers between their memory."""
