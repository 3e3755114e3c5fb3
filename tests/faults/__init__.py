"""Faults that are put into the source one by one, to check that the tests notice them."""
