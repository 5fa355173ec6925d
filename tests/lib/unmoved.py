"""Imported last by the server that forks ranks: what is there by then is never looked at by a rank's garbage collector.

A rank collects once before it ends. Going through all that torch and nerfstudio brought along would take it longer than
the rest of a short test, and copy the memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
