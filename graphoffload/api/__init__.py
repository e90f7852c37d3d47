"""The functions that users call: explain, offload, tune, and the command line."""
