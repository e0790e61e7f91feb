"""How ranks find each other: bootstraps, hosts, and the meeting that makes a group."""
