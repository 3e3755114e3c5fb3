"""What agents ask of a server: spans by message, edits of their context, sessions."""
