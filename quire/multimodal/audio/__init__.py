"""Audio input: decoding, log-mel features, cuts of long audio and voice activity. NumPy only; samples are mono float32."""
