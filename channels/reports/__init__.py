"""Reports: a rank writes a report when it hangs, and the doctor reads the reports of all ranks together."""
