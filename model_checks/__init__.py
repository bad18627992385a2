"""What is proved and searched about the tables.  Knows tables and machines, never an allocator."""
