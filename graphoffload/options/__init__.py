"""The user's options with their checks, policies, patterns on module names, and named boundaries."""
