"""Tests of RDMA, which run in a machine with Soft-RoCE devices: make test-rdma.

A package, so that its conftest.py is another module than the one of all tests.
"""
