"""Memory shared between processes, pools, and caches of what a peer has opened."""
