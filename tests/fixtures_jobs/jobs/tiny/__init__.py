"""A minimal family for the tests of configuration and runs."""
