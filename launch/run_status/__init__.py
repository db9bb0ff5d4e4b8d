"""The status of runs, local ones and those on Slurm."""
