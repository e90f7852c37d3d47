"""The user's requests: every option with its checks, policies, patterns on module names, and named boundaries."""
