"""What the tests stand on: ranks, daemons, fake devices, oracles, and the programs that they start."""
