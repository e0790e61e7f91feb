"""Observing a proxy from outside its process: its counters, plain and as metrics, and its trace."""
