"""Copies on side streams: one call that copies and records its events, and the stalls of compute."""
