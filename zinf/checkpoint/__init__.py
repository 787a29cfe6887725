"""Checkpoints. Those of others: import into a store, export from it, streamed, with the values exact and the memory fixed.

    source    where parameters come from: a folder of safetensors files, or a module in memory
    part      a piece of a tensor of the files that a parameter, or a piece of it, is

and zinf's own: a committed step saved beside training (saving, saver, tags), and loaded into any other layout (restoring).

Nothing here knows transformers; zinf.hf.loading brings the names. See [Note: the memory of a stream] in staging.py and
[Note: a crash leaves no half checkpoint] in exporting.py.
"""

from zinf.checkpoint.exporting import export_safetensors
from zinf.checkpoint.importing import import_nbytes, import_tensors
from zinf.checkpoint.resuming import import_store
from zinf.checkpoint.sources import ModuleSource, Reader, SafetensorsSource, Source, check
from zinf.checkpoint.staging import Part

__all__ = ["ModuleSource", "Part", "Reader", "SafetensorsSource", "Source", "check", "export_safetensors", "import_nbytes", "import_store", "import_tensors"]
