"""Files that training leaves, read without torch: by the launcher, the report and tools."""
