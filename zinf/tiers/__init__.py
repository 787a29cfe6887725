"""The tiers of memory below the engine: NVMe (nvme.py), host (host.py) and device (device.py)."""
