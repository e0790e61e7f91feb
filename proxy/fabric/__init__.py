"""Sets libfabric up: chooses a provider, opens an endpoint, registers memory. The engine then moves the data.

The package does not know about ranks: its callers send the endpoints' addresses to peers, as bytes.
"""
