"""A family small enough to read at a glance, for the tests of configuration and runs."""
