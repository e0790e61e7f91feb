"""Forks, threads, signals, namespaces and CPU cores of this process, and directories of its user."""
