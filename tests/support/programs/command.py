"""Runs the command `proxyccl` as a program that forked.py can start."""

import sys

from proxyccl.__main__ import main

sys.exit(main())
