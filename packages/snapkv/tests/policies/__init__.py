"""Tests of what policies promise: parameters, selections, masks and the check at run time."""
