"""Load on a service, and what came of it: through the front as clients do, judged from the evidence files.

Layout (each imports only what stands above it)::

    settings   a trial's service: a configuration with the trial's knobs turned
    load       the requests and their measurements
    client     the process that sends them
    report     the figures as text and JSON
    run        starts a service, loads it, drains it, judges it
"""
