"""Tool calls: parsers of the formats that models write, and the tools of requests."""
