"""The subcommands of `proxyccl`."""
