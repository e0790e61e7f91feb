"""The process that the ranks of a host are forks of (forked.py): it has the transport between hosts too.

    python template.py DESCRIPTOR

libfabric looks for its providers once in a process, which takes longer than all else that a short job does.
"""

from __future__ import annotations

from proxyccl.proxy.fabric import endpoint  # noqa: F401  (a rank imports it when it reaches another host)
from proxyccl.proxy.fabric.library import fabric_offers, load
from support.forked import be_the_template, import_all

if __name__ == "__main__":
    import_all()
    fabric_offers()
    load.cache_clear()  # a rank may name another library
    be_the_template()
