"""Coming from DeepSpeed: `reading.py` reads its JSON, `keys.py` is the table of what becomes of each key, `config.py` takes one through it."""
