"""Jobs on a Slurm cluster: submitted, run, restarted, watched, cancelled."""
