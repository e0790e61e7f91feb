"""Runs the process of which a host's ranks are forks (forked.py); it has also imported the transport between hosts.

    python template.py DESCRIPTOR

libfabric searches for its providers once in a process, and the search takes longer than the rest of a short job.
"""

from __future__ import annotations

from proxyccl.proxy.fabric import endpoint  # noqa: F401  (a rank imports it when it reaches another host)
from proxyccl.proxy.fabric.library import fabric_offers, load
from support.forked import be_the_template, import_all

if __name__ == "__main__":
    import_all()
    fabric_offers()
    load.cache_clear()  # a rank may name another libfabric
    be_the_template()
