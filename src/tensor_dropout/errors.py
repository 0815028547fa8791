"""The exception that the library raises for a user's mistake, and a kind of it that passes by itself."""


class TensorDropoutError(ValueError):
    """A request that cannot be carried out.

    The message says the operation, what was expected, what came, and which setting to change.
    """


class BusyError(TensorDropoutError):
    """Another process is doing what was asked for."""
