"""The bookkeeping of a compressed cache: layers, slots, notes, what is read and saved; no attention."""
