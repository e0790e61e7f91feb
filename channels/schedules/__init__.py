"""Schedules: prepared work of the ranks' proxies, by which a collective needs no kernel."""
