"""Data files of meridian_patch, installed as ``meridian_patch.configs``."""
