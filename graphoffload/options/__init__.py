"""What the user says: every option with its checks, policies, patterns on module names, and named boundaries."""
