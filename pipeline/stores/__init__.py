"""Objects and files by URL: one way to list, read, write and fetch them, whichever cloud or disk holds them."""
