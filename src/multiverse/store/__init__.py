"""The only SQL: live rows, claims, and the journal, in one SQLite file whose schema Alembic keeps."""

from multiverse.store.database import Entry, Store, StoreConflict, Transaction, open_store

__all__ = ["Entry", "Store", "StoreConflict", "Transaction", "open_store"]
