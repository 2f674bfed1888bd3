"""The error tree: one base, so that a user can catch by package."""


class PackageError(Exception):
    """Base of everything that this package raises."""


class LocalProtocolError(PackageError):
    """The caller broke the contract. Nothing was changed."""
