"""The paper's experiments: tasks by name, one runner, results that can be continued."""
