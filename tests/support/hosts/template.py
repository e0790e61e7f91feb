"""Runs an emulated host's template process (forked.py), which has imported the fabric transport.

    python template.py DESCRIPTOR

The template lets libfabric search for providers before it forks, because the search takes longer than a short job.
"""

from __future__ import annotations

from proxyccl.proxy.fabric import endpoint  # noqa: F401  (ranks that reach other hosts use this module)
from proxyccl.proxy.fabric.library import fabric_offers, load
from support.forked import be_the_template, import_all

if __name__ == "__main__":
    import_all()
    fabric_offers()
    load.cache_clear()  # lets each rank load a different libfabric
    be_the_template()
