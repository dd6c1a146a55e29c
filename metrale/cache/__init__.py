"""Bookkeeping of the paged K/V cache: blocks, tables, groups, identities and the memory budget. No device code."""
