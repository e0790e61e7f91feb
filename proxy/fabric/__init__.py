"""Chooses a provider of libfabric, opens endpoints and registers memory. The engine then moves the data.

The package does not know about ranks: callers send the endpoints' addresses to peers, as bytes.
"""
