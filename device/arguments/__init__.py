"""Values from callers: flags, integers and texts, checked."""
