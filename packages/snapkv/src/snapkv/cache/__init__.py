"""What a compressed cache knows about its tokens: layers, slots, prompts, reports and files."""
