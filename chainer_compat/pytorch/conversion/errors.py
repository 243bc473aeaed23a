"""The error of everything that cannot be converted."""


class ConversionError(ValueError):
    """Raised if a model cannot be converted. Nothing was written.

    The message names the function, the link that called it, and the line of the program.
    """
