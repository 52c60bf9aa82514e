"""The only SQL: live rows, claims, the journal, and what was used, in one SQLite file whose schema Alembic keeps."""

from multiverse.store.database import Entry, Store, StoreConflict, Transaction, open_store
from multiverse.store.history import Pruned, Pruning
