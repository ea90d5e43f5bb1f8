"""Submitting runs to Slurm."""
