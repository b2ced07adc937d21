"""Answers from text to reasoning, content, tool calls and log-probabilities; grammars of structured outputs."""
