"""Everything that looks at a run or a machine from outside."""
