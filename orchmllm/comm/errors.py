"""Errors that all ranks raise together."""


class AgreedError(RuntimeError):
    """Raised with the same text on all ranks; the text is meant for the user. saves: whether a
    run that it ends saves the steps before it."""

    saves = True
