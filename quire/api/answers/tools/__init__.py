"""Tool calls in what models write: one small parser for each form of writing them."""
