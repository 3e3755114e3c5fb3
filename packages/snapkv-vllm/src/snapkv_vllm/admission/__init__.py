"""What a server and its requests may ask for, and when and to what a prompt is compressed."""
