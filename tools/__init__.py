"""Everything that looks at a run or a machine from outside."""

if __name__ != "drover.tools":
    raise ImportError("Drover's tools are imported as drover.tools: as tools they would be a second copy.")
