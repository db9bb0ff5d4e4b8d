"""Is every byte of a run still what it was when it was made? `drover verify RUN`."""
