"""What can go wrong, as types. Messages are one line: what happened, where, and what to do about it.

I/O failures are plain OSError (errno, path, operation, offset, length). Wrong arguments are TypeError and ValueError.
"""


class ZinfError(RuntimeError):
    """Base of the errors that are zinf's own."""


class ConfigError(ZinfError, ValueError):
    """A key that does not exist, a value that makes no sense, or two that contradict each other."""


class BudgetError(ZinfError):
    """Something does not fit: names the tier, the need, the budget and the option to change. Raised before any work."""


class StoreError(ZinfError):
    """A store that cannot be used: missing, locked, of another model, of another format."""


class IntegrityError(StoreError):
    """Bytes on NVMe are not the bytes that were written: names path, offset, shard and parameters."""


class CommitError(OSError):
    """A commit could not be made (a full disk, mostly), and nothing was lost by it: free space, then go on, or call synchronize() or recover()."""


class NonFiniteError(ZinfError):
    """A gradient or a loss was NaN or infinite, more often in a row than the config allows."""


class EngineError(ZinfError):
    """The engine was used out of order: after close, backward twice, a parameter touched while it is not bound."""


class CheckpointError(ZinfError, ValueError):
    """A checkpoint that cannot be imported or exported: names the files or tensors, what is wrong, and what to do."""
