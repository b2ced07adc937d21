"""What exports over OTLP share, OpenTelemetry's protocol: settings, and the service that they are of."""
