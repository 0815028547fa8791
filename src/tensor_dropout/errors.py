"""The exception that the library raises for a user's mistake."""


class TensorDropoutError(ValueError):
    """A request that cannot be carried out.

    The message says the operation, what was expected, what came, and which setting to change.
    """
