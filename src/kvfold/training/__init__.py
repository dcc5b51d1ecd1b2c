"""Training of retention gates (DBTrimKV): attention that forgets, three losses, and a loop that can be stopped."""
