"""Plans and choices in words and pictures."""
