"""Measurements of snapkv on the demo model.

Every number becomes a JSON row in `docs/results`, and the pages there are rendered from the rows.
"""
