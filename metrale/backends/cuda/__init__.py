"""The CUDA backend: naive kernels, compiled by NVRTC for the device at hand. CuPy is imported when a backend opens."""
