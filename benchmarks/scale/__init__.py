"""What grows with runs, data and ranks: the cases of `trainyard bench scale`."""
