"""Sets RDMA up with pyverbs: finds devices, opens endpoints, registers memory. The engine then moves the data.

The package does not know about ranks: its callers send the endpoints' addresses to peers, as bytes.
"""
