"""The command line. Each command is a module with `arguments(parser)` and `start(args)`; its docstring is the command's help.

command_line   reads the arguments, runs one command, and turns errors into one line and an exit status
fields         the fields of OffloadConfig as options
"""
