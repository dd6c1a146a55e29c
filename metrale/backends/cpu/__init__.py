"""The CPU backend: C and Numba kernels, a thread team, programs that replay a captured step."""
