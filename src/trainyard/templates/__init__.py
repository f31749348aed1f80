"""Families that `trainyard new` copies, each a folder as in `jobs/`; nothing here imports them."""
