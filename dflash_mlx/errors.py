"""Errors for people: each message names the value that is wrong and the remedy."""


class DFlashError(ValueError):
    """Bad input or an impossible request; the message is one sentence with the value and the remedy."""


class PairMismatchError(DFlashError):
    """The draft was not made for this target."""


class UnknownPairError(DFlashError):
    """No draft is known for this target, or more than one target could be meant."""


class CheckpointError(DFlashError):
    """A checkpoint or its config is missing, damaged or of an unknown kind."""


class UnsupportedTargetError(DFlashError):
    """The target's caches or layers cannot be rolled back exactly."""


class UnsupportedOptionError(DFlashError):
    """An option that speculation cannot honour; it is refused, never ignored."""


class TargetStateError(RuntimeError):
    """A failed forward or commit left the caches unusable; the caller has to start from a fresh cache."""
