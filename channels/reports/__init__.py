"""Reports: a rank writes one when it hangs, and the doctor reads those of all ranks together."""
