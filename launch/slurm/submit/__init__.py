"""On the login node: requests, scripts, the copy of the code."""
