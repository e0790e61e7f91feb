"""Brings libfabric up: chooses a provider, opens an endpoint, registers memory. The engine then moves the data.

It knows nothing of ranks. Its callers carry endpoints' addresses to peers, as bytes.
"""
