"""A stand-in for Ray: the base classes of its direct transport, as Ray 2.60 has them, without Ray itself."""
