"""The one exception type for failures that the user can act on."""


class FlowError(Exception):
    """A failure with a message that says what is wrong, where, and what to do next.

    Command lines print it without a traceback; every other exception counts as a defect of
    fp8flow and is shown with one.
    """
