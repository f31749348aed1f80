"""A family that trains in seconds: classifies the direction of stripes."""
