"""Brings RDMA up with pyverbs: finds devices, opens endpoints, registers memory. The engine then moves the data.

It does not know about ranks. Its callers carry endpoints' addresses to peers, as bytes.
"""
