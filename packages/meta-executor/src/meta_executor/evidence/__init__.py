"""What the ranks of a run left behind, and what it proves.

Layout (each imports only what stands above it)::

    records   files to records
    verify    records to findings

A leaf: imports pp_agreement's comparison and nothing of the other rooms, so evidence can be judged where nothing of the
service is installed or running.
"""
