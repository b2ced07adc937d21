"""The dashboards, one in each module."""
