"""What the `proxyccl` command runs."""
