"""The path where Linux lists RDMA devices."""

from pathlib import Path

SYSFS = Path("/sys")
DEVICES = "class/infiniband"
"""The directory of RDMA devices in it."""
