"""One rank of an instance as a process.

Layout (each imports only what stands above it)::

    startup       what the ranks tell one another before the first request
    free_memory   how much memory this process could still take
    kv_budget     how many KV blocks there are: configured, or measured
    assemble      measure, exchange, compose
    teardown      release on proof, or never
    worker        the process
    testing       real instances for tests
"""
