"""`proxyccl top --web`: the activity of this machine's ranks and proxies, in a browser."""
