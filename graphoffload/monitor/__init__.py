"""What is watched while training runs, and the warnings that say what was asked for and not done."""
