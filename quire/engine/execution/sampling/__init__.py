"""From logits to tokens: stages that change logits, in order, then a choice. Nobody pays for what nobody asked."""
