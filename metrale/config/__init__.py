"""Configurations: strict readers, model specs, engine options and sampling parameters. No weights, no device code."""
