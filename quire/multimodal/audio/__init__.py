"""Audio input: decoding, log-mel features, cuts, voice activity. NumPy only; samples are mono float32."""
