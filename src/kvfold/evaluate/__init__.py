"""Measuring what a fold loses: shared prefills, tasks and metrics."""
