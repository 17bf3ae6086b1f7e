"""Tool calls in an answer's text: one file per family of models, and the table of them in `registry`."""
