"""A seeded simulation of one classic group: clients, a network, storage and time, all of them unreliable.

The one idea: everything follows from the seed. `world.py` owns time and chance, `clients.py` plays consumers that
do what stock clients do, `server.py` runs `step` as the gateway's runner does (store, then reply; crash, evict,
restore), `referee.py` checks what must hold after every step and knows nothing of how steps are made, `run.py` makes a
run of it: a stretch of faults, then calm weather in which every live client has to end Stable.

    python -m tests.coordinator.simulation 17          one seed, told step by step
    python -m tests.coordinator.simulation 0 5000      a range of seeds, only failures told
"""
