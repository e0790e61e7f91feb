"""Collectives, built on the two kinds of channel."""
