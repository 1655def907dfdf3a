"""What was compiled is kept on disk, and found again by other processes: see docs/cache.md."""
