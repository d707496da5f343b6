"""A seeded simulation of one classic group: clients, a network, storage and time, all of them unreliable.

Everything follows from the seed. `world.py` owns time and chance. `clients.py` simulates consumers that do what stock
clients do. `server.py` runs `step` as the gateway's runner does (store, then reply; crash, evict, restore).
`referee.py` checks the rules after every step and does not know how steps are made. `run.py` makes a run: a stretch of
faults, then calm weather in which every live client must end Stable.

    python -m tests.coordinator.simulation 17          one seed, told step by step
    python -m tests.coordinator.simulation 0 5000      a range of seeds, only failures told
"""
