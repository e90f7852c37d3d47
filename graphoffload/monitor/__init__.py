"""Checks while training runs, and the warnings about requests that had no effect."""
