"""The parts that run in vLLM's web server: they check bodies, find questions, and list sessions."""
