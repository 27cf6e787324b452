"""Our own kernels for CPUs."""
