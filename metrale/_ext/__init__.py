"""Compiled helpers: integers and bytes, no knowledge of models or backends."""
