"""The one error tree."""

from __future__ import annotations


class BatchSubmitError(Exception):
    """Base of everything that this package raises on purpose."""


class BatchConfigError(BatchSubmitError, ValueError):
    """A setting or environment variable is wrong; the message names it."""


class BatchUsageError(BatchSubmitError):
    """The caller broke the contract: another loop's thread, an id that is outstanding already, a send that returns nonsense."""


class BatchClosed(BatchSubmitError):
    """The submitter was closed. The request was not taken."""


class BatchBackpressure(BatchSubmitError):
    """``outstanding_max`` requests are not settled. The request was not taken: the one retryable refusal."""


class BatchAborted(BatchSubmitError):
    """The request was removed while it was still buffered. It was never sent."""


class BatchSendFailed(BatchSubmitError):
    """The whole send failed; ``__cause__`` is the send's own exception. The registration was rolled back."""


class BatchItemFailed(BatchSubmitError):
    """The worker refused this request alone; the others of its batch are unaffected."""


class BatchOutcomeError(BatchSubmitError):
    """The worker answered with something that is not one outcome per request; every request of the batch gets this."""
