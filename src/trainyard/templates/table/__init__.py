"""A family of jobs."""
