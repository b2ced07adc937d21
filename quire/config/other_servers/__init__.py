"""Command lines and variables of other servers: vLLM's are obeyed, others refused with the name of Quire's setting."""
