"""Schedules: work prepared for a rank's proxies, so that a collective needs no kernel."""
