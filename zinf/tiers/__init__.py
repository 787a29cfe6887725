"""The tiers of memory below the engine.

nvme.py         Store: the chunks of a model on NVMe, always at a committed step
chunk.py        one chunk's versions, and the ticket of one transfer of it
manifest.py     what a store says of itself on disk, replaced whole
directory.py    the directories: fit, room, lock, removal
opening.py      what is looked at before the first byte moves
scrub.py        reading chunks back and comparing checksums
leftovers.py    inspect and clean
host.py         Arena and Slots: the host memory
"""
