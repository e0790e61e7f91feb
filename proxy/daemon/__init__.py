"""The node daemon: one process that runs the proxies of a node's ranks. The daemon does not know about collectives."""
