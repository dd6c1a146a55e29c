"""Peers, each measured in a process of its own that prints one JSON object."""
