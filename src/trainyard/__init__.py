"""Training jobs for mixed-GPU clusters, workstations and time-limited sessions."""

__version__ = "0.1.0"
