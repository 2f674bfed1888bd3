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
    """The whole send failed and no request of it was served; ``__cause__`` is the send's own exception."""


class BatchSendUnknown(BatchSendFailed):
    """The send failed in a way that does not say whether the requests were served (a time-out, a dead peer, an interrupt).

    ``__cause__`` is the send's own exception. A retry could serve a request twice.
    """


class BatchItemFailed(BatchSubmitError):
    """The worker refused this request alone; the others of its batch are unaffected."""


class BatchOutcomeError(BatchSubmitError):
    """The worker answered with something that is not one outcome per request; whether they were served is unknown."""
