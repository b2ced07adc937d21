"""Images, compose file, Kubernetes manifests and the Helm chart; the tests marked `containers`: see ``bin/test-containers``."""
