"""HTTP endpoints. Packages from low to high: http, mcp and chat, other endpoint families."""
