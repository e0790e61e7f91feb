"""Memory shared between processes, pools, and caches of mappings."""
