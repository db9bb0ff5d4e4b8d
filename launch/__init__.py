"""How stages get machines: what users run, the plan, local processes, Slurm."""
