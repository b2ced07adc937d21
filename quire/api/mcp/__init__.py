"""Tools that other servers offer over the Model Context Protocol, for `/v1/responses`."""
