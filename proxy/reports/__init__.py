"""What the reports of ranks and of the node daemon have in common: files, the checks when they are read, rings."""
