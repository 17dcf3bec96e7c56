"""Why a model cannot be used."""


class ModelError(Exception):
    """A model is missing, damaged, unsafe or of a kind we do not run. The text says what to do next."""
