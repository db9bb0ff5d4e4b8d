"""What every stage is: a run folder, a manifest written last, units, locks, state, and one command line."""
