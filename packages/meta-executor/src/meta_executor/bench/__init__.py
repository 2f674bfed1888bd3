"""Load on a service, and what came of it: through the front as clients do, or at an instance's door as a front's proxy does,
judged from the evidence files.

Layout (each imports only what stands above it)::

    lengths        how long prompts and answers are
    spread         percentiles, and what a median of few runs is worth
    load           the requests and their measurements
    settings       a trial's service: a configuration with the trial's knobs turned
    client         the process that sends them to a front
    proxy_client   the process that sends them to an instance
    sampling       processor time by thread, and queues, while a load runs
    loops          what the ranks' loops did with their time
    report         the figures as text and JSON
    trace          the same for Perfetto
    knobs          what can be switched off and on, and how one sees which it was
    compare        a knob's two arms run in turn, and what the rounds tell
    run            starts a service, loads it, drains it, judges it
"""
