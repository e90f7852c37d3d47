"""graphoffload where others call torch.compile: the switch for a whole process, and callbacks of trainers."""
