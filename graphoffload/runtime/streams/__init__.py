"""Copies on side streams: one call that copies and records its events, and what compute waited for."""
