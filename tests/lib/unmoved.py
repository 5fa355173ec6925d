"""Last import of the server that forks ranks: ranks' garbage collectors skip all objects that exist by then.

A rank collects once before it ends. Scanning all objects of torch and nerfstudio would take longer than the rest of a
short test, and copy the memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
