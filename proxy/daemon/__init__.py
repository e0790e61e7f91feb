"""The node daemon: one process that runs the proxies of a node's ranks. It does not know about collectives."""
