"""The bookkeeping of a compressed cache: layers, slots, notes, reading, files; no attention."""
