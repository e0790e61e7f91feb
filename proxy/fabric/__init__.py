"""Brings libfabric up: chooses a provider, opens an endpoint, registers memory. The engine then moves the data.

It does not know about ranks. Its callers carry endpoints' addresses to peers, as bytes.
"""
