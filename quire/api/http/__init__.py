"""What every endpoint shares of HTTP: strict bodies, server-sent events, undeclared fields, request ids, errors."""
