"""Kernels of our own for CPUs."""
