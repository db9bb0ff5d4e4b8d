"""How stages get machines: what users run, the plan, local processes, Slurm."""

if __name__ != "drover.launch":
    raise ImportError("Drover's launch is imported as drover.launch: as launch it would be a second copy.")
