"""Events of the prefix cache, for routers that send requests to the replica that has their prefixes."""
