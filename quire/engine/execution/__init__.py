"""From a plan on ints to tensors and back: request table, batch, KV cache, attention, sampler, model runner."""
