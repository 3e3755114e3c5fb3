"""What people look at when a run is done: figures, and a page with tables."""
