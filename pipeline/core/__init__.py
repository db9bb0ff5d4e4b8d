"""What everything stands on: files, records, errors, the console, threads."""
