"""The commands of the command line, one module each.

A module ``wideflat/commands/some_name.py`` is the command ``wideflat some-name``. It defines a dataclass ``Command``
whose fields are the options, whose docstring is the help text and whose ``run()`` does the work and returns the exit
code. Only the module of the command that was typed is imported.
"""
