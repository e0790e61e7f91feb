"""Observes a proxy from outside its process: reads its counters, formats them as metrics, and traces it."""
