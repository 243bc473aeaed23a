"""The error for models and optimizers that cannot be converted."""

import sys


class ConversionError(ValueError):
    """Raised if a model cannot be converted. No file has been written.

    The message gives the function, the link that called it, and the line in the user's script.
    """


def name_of_kind(value: object) -> str:
    """Return the name of an object's class as users write it, such as ``torch.optim.Adam``."""
    kind = type(value)
    if kind.__qualname__.endswith('.GraphModuleImpl'):  # each GraphModule has its own class
        kind = kind.__mro__[1]
    if kind.__module__ == 'builtins':
        return kind.__name__
    parts = kind.__module__.split('.')
    modules = ['.'.join(parts[:n + 1]) for n in range(len(parts))]
    return next((f'{module}.{kind.__name__}' for module in modules if getattr(
        sys.modules.get(module), kind.__name__, None) is kind), kind.__qualname__)
