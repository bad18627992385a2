"""The errors that a user of the package can meet."""


class InputError(Exception):
    """Bad input: a table, trace, model or argument.  The message is one line, ``<file>:<place>: <reason>``."""
