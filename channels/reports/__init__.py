"""Reports: what a rank writes down when it hangs, and what the reports of all ranks say together."""
