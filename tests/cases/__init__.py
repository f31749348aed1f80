"""Builders of test data, one file for each family: they import pytest, so they are not part of an installation."""
