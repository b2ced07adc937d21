"""Names of models as people type them, the repositories that they mean, and the files of these that are needed."""
