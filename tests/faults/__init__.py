"""Faults that are seeded one at a time: each must turn tests red, or the suite has a gap."""
