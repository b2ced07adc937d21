"""HTTP endpoints: protocol models, routes, server-sent events, errors."""
