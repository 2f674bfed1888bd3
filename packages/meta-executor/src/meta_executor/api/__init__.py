"""An instance's door, on rank 0: requests come in, answers go out.

Layout (each imports only what stands above it)::

    endpoint        whether a request may come in now
    batching        when submits are sent together
    service         what the worker offers, by RPC or by a direct call
    worker_client   the way to a worker, or to a door
    door            where the front's stream ends
    proxy           submits and spreads the answers: the front's end of a stream, and the HTTP server's
    server          the paths of :mod:`meta_executor.wire` over HTTP
    instance        HTTP server and door of one instance, put together
    spawned         the same as a process of its own
"""
