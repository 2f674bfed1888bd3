"""A run's processes and its folder: starting worlds of ranks, watching them, ending them, leaving nothing behind.

Layout (each imports only what stands above it)::

    procfs      what /proc says of a process
    shm         segments that a dead world leaves in /dev/shm
    exposure    who can reach a listener
    lasting     what a start has made is kept from the garbage collector
    report      a process's word to the launcher
    guard       stands between mpiexec and a rank, and survives it
    rundir      the run's folder
    parts       command lines that start the parts on their hosts
    find_run    which run's front answers at an address
    launch      starts, watches, restarts and ends the instances and the front
"""
