"""The routes of the API, one module for each subject. Each module has `router(backend)`."""
