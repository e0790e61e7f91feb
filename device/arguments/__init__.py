"""Checks of values from callers: flags, integers and texts."""
