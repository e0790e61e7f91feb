"""Support for the tests: ranks, daemons, fake devices, oracles, and the programs that they start."""
