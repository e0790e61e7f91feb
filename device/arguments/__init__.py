"""Checks arguments from callers: flags, integers and texts."""
