"""The revisions of the schema, oldest first. One that has been released is never edited."""
