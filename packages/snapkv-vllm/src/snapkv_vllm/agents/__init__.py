"""What agents ask of a server: spans of their prompts, sessions."""
