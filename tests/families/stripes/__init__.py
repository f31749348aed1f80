"""A family that trains in seconds: tell the direction of stripes."""
