"""Measuring an artifact: processes of their own, interleaved rounds, medians."""
