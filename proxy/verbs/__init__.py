"""Finds RDMA devices, opens endpoints and registers memory, with pyverbs. The engine then moves the data.

The package does not know about ranks: callers send the endpoints' addresses to peers, as bytes.
"""
