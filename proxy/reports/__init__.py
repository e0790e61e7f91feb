"""The common parts of ranks' and the node daemon's reports: files, checks on reading, rings."""
