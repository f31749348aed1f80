"""tinydet's packing."""

from jobs.tinydet.pack import fit_artifacts, samples, splits, synthesize, unlabelled

__all__ = ["fit_artifacts", "samples", "splits", "synthesize", "unlabelled"]
