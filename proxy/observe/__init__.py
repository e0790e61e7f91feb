"""What can be seen of a proxy from outside its process: its counters, as they are and as metrics, and its trace."""
