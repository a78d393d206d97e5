"""Processes: what a launcher tells them, what they tell it, and how a command ends."""
