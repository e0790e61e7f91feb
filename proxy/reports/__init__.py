"""Code that ranks' reports and the node daemon's reports share: files, checks on reading, rings."""
