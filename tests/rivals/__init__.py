"""Detectors of other libraries, to measure tinydet against: a folder of families for --jobs."""
