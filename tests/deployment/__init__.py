"""Images, compose file, Kubernetes manifests and chart; ``bin/test-containers`` runs those marked `containers`."""
