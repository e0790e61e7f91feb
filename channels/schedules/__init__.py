"""Schedules: prepared work for the ranks' proxies, with which a collective needs no kernel."""
