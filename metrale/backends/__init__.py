"""Backends: one contract (`base`), a plain one (`reference`), the CPU's and CUDA's."""
