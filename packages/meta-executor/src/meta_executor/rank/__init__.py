"""One rank of an instance as a process.

Layout (each imports only what stands above it)::

    free_memory, kv_budget  how much KV memory there may be
    startup                 what the ranks tell one another before the first request
    assemble                measure, exchange, compose
    teardown                release on proof, or never
    worker                  the process
    testing                 real instances for tests
"""
