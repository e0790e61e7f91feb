"""What a rank's proxies are prepared for, so that a collective needs no kernel."""
