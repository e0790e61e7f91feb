"""This process: its forks, threads and signals, its namespaces, and its user's directories."""
