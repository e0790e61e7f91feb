"""Brings RDMA up with pyverbs: finds devices, opens endpoints, registers memory. The engine then moves the data.

It knows nothing of ranks; endpoints' addresses are bytes that somebody else carries to the peer.
"""
