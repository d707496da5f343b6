"""One self-contained page, and its pictures."""
