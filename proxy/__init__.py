"""The CPU's side: rings, the C engine that drains them, and the service that runs it.

It knows nothing of collectives.
"""
