"""What a model's files say: its spec, tasks and facts for the front end, and what is refused. Without torch."""
