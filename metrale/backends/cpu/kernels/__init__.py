"""The kernels: C sources, and one Numba file a family of ops (compiled by `metrale.backends.cpu.jit`)."""
