"""Workloads, clients, metrics and reports for served comparisons."""
