"""Settings of a server and its requests: their checks, and the plan of when and how to compress."""
