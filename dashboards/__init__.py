"""Dashboards and alerts for servers: what they show, and writers of files for Grafana, Perses and Prometheus."""
