"""Detectors of other libraries on tinydet's data, batches, augmentation and metrics."""
