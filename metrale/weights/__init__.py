"""From a checkpoint's tensors to a backend's packed weights: maps, names, preflight and the loader."""
