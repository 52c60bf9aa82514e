"""The schema of the first release, 0.9.0. `schema.metadata` makes its tables."""

revision = "0001"
down_revision = None
