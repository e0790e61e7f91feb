"""The command `proxyccl`, as a program that can be a fork (forked.py)."""

import sys

from proxyccl.__main__ import main

sys.exit(main())
