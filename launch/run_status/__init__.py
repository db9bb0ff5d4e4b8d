"""How runs stand, local ones and those on Slurm."""
