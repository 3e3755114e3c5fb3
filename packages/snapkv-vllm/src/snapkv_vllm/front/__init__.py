"""What stands in vLLM's web server: bodies are judged, prompts rendered, sessions listed."""
