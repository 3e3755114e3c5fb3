"""Who answers the questions of a run: this process, several, or Ray's workers."""
