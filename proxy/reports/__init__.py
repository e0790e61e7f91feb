"""The common part of the reports of ranks and of the node daemon: files, the checks when they are read, rings."""
